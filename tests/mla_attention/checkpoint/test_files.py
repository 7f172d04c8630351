"""safetensors files, folders and indexes: what is found, what is opened, what is refused."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from mla_attention.checkpoint import files, load_hf_state_dict, load_megatron_state_dict, to_hf_state_dict
from mla_attention.configs import tiny
from tests.mla_attention.checkpoint.layers import build, same_bits, weights_of
from tests.mla_attention.checkpoint.test_fp8 import fp8_checkpoint

PREFIX = "model.layers.3.self_attn."


def write_shards(folder, tensors, *, shards: int, index: bool) -> dict[str, str]:
    """Write the tensors round-robin into shards, so that a scale lies in another file than its weight."""
    weight_map = {key: f"model-{i % shards:05d}.safetensors" for i, key in enumerate(tensors)}
    for name in set(weight_map.values()):
        save_file({key: tensors[key].contiguous() for key in tensors if weight_map[key] == name}, folder / name)
    if index:
        (folder / files.INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of the files that were opened, in order."""
    names: list[str] = []
    real = files.safe_open

    def spy(path, **arguments):
        names.append(path.rpartition("/")[2])
        return real(path, **arguments)

    monkeypatch.setattr(files, "safe_open", spy)
    return names


@pytest.mark.parametrize("place", ["file", "folder", "folder with index", "index file"])
@pytest.mark.parametrize("as_string", [False, True])
def test_each_kind_of_path(tmp_path, place, as_string) -> None:
    source, target = build(tiny()), build(tiny())
    tensors = to_hf_state_dict(source, PREFIX) | {"model.norm.weight": torch.ones(3)}
    write_shards(tmp_path, tensors, shards=1 if place == "file" else 3, index="index" in place)
    path = {"file": tmp_path / "model-00000.safetensors", "index file": tmp_path / files.INDEX_NAME}.get(
        place, tmp_path
    )
    load_hf_state_dict(target, str(path) if as_string else path, PREFIX)
    assert same_bits(weights_of(source), weights_of(target))


def test_a_scale_may_lie_in_another_shard_than_its_weight(tmp_path) -> None:
    layer = build(tiny())
    tensors, values = fp8_checkpoint(layer)
    weight_map = write_shards(tmp_path, tensors, shards=2, index=True)
    assert weight_map["o_proj.weight"] != weight_map["o_proj.weight_scale_inv"]
    load_hf_state_dict(layer, tmp_path)
    assert same_bits(to_hf_state_dict(layer), values)


def test_with_an_index_only_the_layers_files_are_opened_once(tmp_path, opened) -> None:
    layer = build(tiny())
    tensors = to_hf_state_dict(layer, PREFIX)
    weight_map = write_shards(tmp_path, tensors, shards=2, index=True)
    weight_map |= {"model.layers.4.self_attn.o_proj.weight": "absent.safetensors"}
    (tmp_path / files.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    load_hf_state_dict(layer, tmp_path, PREFIX)
    assert sorted(opened) == ["model-00000.safetensors", "model-00001.safetensors"]


def test_megatron_weights_from_a_file(tmp_path) -> None:
    source, target = build(tiny()), build(tiny())
    save_file({f"decoder.{key}": value for key, value in source.state_dict().items()}, tmp_path / "a.safetensors")
    load_megatron_state_dict(target, tmp_path / "a.safetensors", "decoder.")
    assert same_bits(weights_of(source), weights_of(target))


def broken_folders() -> dict[str, str]:
    return {
        "nothing there": "no safetensors checkpoint at",
        "empty folder": "no safetensors checkpoint at",
        "pickle": "no safetensors checkpoint at",
        "no json": "is no safetensors index",
        "no weight_map": "is no safetensors index",
        "weight_map is a list": "is no safetensors index",
        "index names an absent file": "cannot read the safetensors file",
        "index names an absent key": "the index names extra.weight in",
        "one key in two files": "is in both",
        "truncated file": "cannot read the safetensors file",
        "no key below the prefix": "starts with the prefix 'model.'",
    }


@pytest.mark.parametrize(("fault", "said"), broken_folders().items(), ids=broken_folders().keys())
def test_a_broken_checkpoint_is_named_and_nothing_is_written(tmp_path, fault, said) -> None:
    layer = build(tiny())
    before, tensors = weights_of(layer), to_hf_state_dict(build(tiny()))
    path, prefix = tmp_path, "model." if fault == "no key below the prefix" else ""
    weight_map = {}
    if fault == "nothing there":
        path = tmp_path / "elsewhere"
    elif fault == "pickle":
        path = tmp_path / "pytorch_model.bin"
        torch.save(tensors, path)
    elif fault != "empty folder":
        weight_map = write_shards(tmp_path, tensors, shards=2, index=False)
    if fault == "one key in two files":
        save_file({"o_proj.weight": tensors["o_proj.weight"]}, tmp_path / "another.safetensors")
    if fault == "truncated file":
        file = tmp_path / "model-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
    texts = {
        "no json": "{",
        "no weight_map": "{}",
        "weight_map is a list": '{"weight_map": ["a"]}',
        "index names an absent file": json.dumps({"weight_map": weight_map | {"o_proj.weight": "absent.safetensors"}}),
        "index names an absent key": json.dumps(
            {"weight_map": weight_map | {"extra.weight": "model-00000.safetensors"}}
        ),
    }
    if fault in texts:
        (tmp_path / files.INDEX_NAME).write_text(texts[fault])
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_hf_state_dict(layer, path, prefix)
    assert "\n" not in str(error.value)
    assert same_bits(before, weights_of(layer))


def test_something_else_than_a_mapping_or_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensors must be a mapping of tensors, .* got list"):
        load_hf_state_dict(build(tiny()), [torch.ones(1)])
