"""FP8 weights with tile scales: full and cut tiles, slices that start inside a tile, scales that are missing."""

import re

import pytest
import torch
from torch import Tensor

from mla_attention.checkpoint import load_hf_state_dict, to_hf_state_dict
from mla_attention.checkpoint.files import InMemory, whole
from mla_attention.checkpoint.fp8 import BlockScaled
from mla_attention.configs import tiny
from tests.mla_attention.checkpoint.layers import build, same_bits, weights_of

FP8 = torch.float8_e4m3fn
BLOCK = (128, 128)


def quantised(rows: int, columns: int, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Return random FP8 values and scales that differ from tile to tile."""
    weight = torch.randn(rows, columns).mul(20).to(FP8)
    tiles = (-(-rows // block[0]), -(-columns // block[1]))
    return weight, torch.rand(tiles) * 0.01 + torch.arange(1, tiles[0] * tiles[1] + 1).view(tiles)


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """Return weight * scale tile by tile, in loops, as the definition reads."""
    result = torch.empty(weight.shape, dtype=torch.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            result[tile] = weight[tile].float() * scale[i, j]
    return result


def fp8_checkpoint(layer, block: tuple[int, int] = BLOCK) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return an FP8 checkpoint for the layer and the fp32 values that it stands for."""
    tensors, values = {}, {}
    for key, value in to_hf_state_dict(layer).items():
        tensors[key] = values[key] = value
        if value.ndim == 2:
            tensors[key], tensors[f"{key}_scale_inv"] = quantised(*value.shape, block)
            values[key] = dequantised(tensors[key], tensors[f"{key}_scale_inv"], block)
    return tensors, values


def test_the_fifth_scale_row_of_576_rows_covers_64_rows() -> None:
    weight, scale = quantised(576, 300)
    assert scale.shape == (5, 3)
    values = BlockScaled(InMemory(weight), InMemory(scale), BLOCK).read(whole((576, 300)))
    assert torch.equal(values, dequantised(weight, scale))
    assert torch.equal(values[512:, 256:], weight[512:, 256:].float() * scale[4, 2])


@pytest.mark.parametrize("rows", [(0, 1), (100, 200), (127, 129), (128, 256), (512, 576), (575, 576), (200, 200)])
@pytest.mark.parametrize("columns", [(0, 300), (5, 6), (120, 300), (256, 300)])
def test_a_slice_equals_the_slice_of_the_whole(rows, columns) -> None:
    weight, scale = quantised(576, 300)
    box = (slice(*rows), slice(*columns))
    values = BlockScaled(InMemory(weight), InMemory(scale), BLOCK).read(box)
    assert torch.equal(values, dequantised(weight, scale)[box])


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loading_rounds_once_to_the_parameters_dtype(dtype, scale_dtype) -> None:
    config = tiny(kv_lora_rank=512, qk_pos_emb_head_dim=64)
    layer = build(config, dtype=dtype)
    tensors, _ = fp8_checkpoint(layer)
    scales = {key: value.to(scale_dtype) for key, value in tensors.items() if key.endswith("_scale_inv")}
    load_hf_state_dict(layer, tensors | scales)
    for key, value in to_hf_state_dict(layer).items():
        if value.ndim == 2:
            expected = dequantised(tensors[key], scales[f"{key}_scale_inv"].float())
            assert torch.equal(value, expected.to(dtype)), key


def test_other_tile_sizes() -> None:
    layer = build(tiny())
    tensors, values = fp8_checkpoint(layer, (32, 48))
    load_hf_state_dict(layer, tensors, block_size=(32, 48))
    assert same_bits(to_hf_state_dict(layer), values)


def test_weights_that_stay_in_high_precision_mix_with_fp8_ones() -> None:
    layer = build(tiny())
    tensors, values = fp8_checkpoint(layer)
    del tensors["o_proj.weight_scale_inv"]
    tensors["o_proj.weight"] = values["o_proj.weight"] = torch.randn_like(values["o_proj.weight"])
    load_hf_state_dict(layer, tensors)
    assert same_bits(to_hf_state_dict(layer), values)


def wrong_checkpoints() -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """Return changes to an FP8 checkpoint of `tiny()` and what the error must say."""
    width = tiny().hidden_size
    rows = tiny().kv_lora_rank + tiny().qk_pos_emb_head_dim
    key, norm = "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"
    return {
        "no scale": ({f"{key}_scale_inv": None}, f"{key} is torch.float8_e4m3fn without its scale {key}_scale_inv"),
        "scale without weight": ({key: None}, f"missing: {key}; unexpected: {key}_scale_inv"),
        "scale beside a plain weight": ({key: torch.ones(rows, width)}, f"unexpected: {key}_scale_inv"),
        "scale of another shape": ({f"{key}_scale_inv": torch.ones(7, 1)}, f"{key}_scale_inv is torch.float32 [7, 1]"),
        "integer scale": ({f"{key}_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, "is torch.int32 [1, 1]"),
        "another FP8": ({key: torch.ones(rows, width).to(torch.float8_e5m2)}, f"{key} is torch.float8_e5m2"),
        "FP8 vector": (
            {norm: torch.ones(tiny().kv_lora_rank).to(FP8), f"{norm}_scale_inv": torch.ones(1)},
            f"{norm} is torch.float8_e4m3fn [{tiny().kv_lora_rank}], FP8 weights must be torch.float8_e4m3fn matrices",
        ),
    }


@pytest.mark.parametrize(("changes", "said"), wrong_checkpoints().values(), ids=wrong_checkpoints().keys())
def test_a_wrong_checkpoint_is_refused_and_nothing_is_written(changes, said) -> None:
    layer = build(tiny())
    before = weights_of(layer)
    tensors, _ = fp8_checkpoint(build(tiny()))
    changed = {key: value for key, value in (tensors | changes).items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(said)):
        load_hf_state_dict(layer, changed)
    assert same_bits(before, weights_of(layer))


@pytest.mark.parametrize("block", [(128,), (128, 0), (128, 64.0), 128, (True, 128)])
def test_a_wrong_block_size_is_refused(block) -> None:
    with pytest.raises(ValueError, match=rf"block_size must be two positive ints.*{re.escape(repr(block))}"):
        load_hf_state_dict(build(tiny()), {}, block_size=block)
