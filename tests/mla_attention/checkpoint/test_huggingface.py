"""Hugging Face names and strictness of `load_hf_state_dict` and `to_hf_state_dict`."""

import re

import pytest
import torch

from mla_attention.checkpoint import load_hf_state_dict, to_hf_state_dict
from mla_attention.configs import tiny
from tests.mla_attention.checkpoint.layers import CONFIGS, DSA, NAMES, build, same_bits, weights_of

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@each_config
def test_every_tensor_lands_in_its_own_parameter(config) -> None:
    layer = build(config)
    state = layer.state_dict()
    tensors = {NAMES[name]: torch.full(value.shape, float(i)) for i, (name, value) in enumerate(state.items())}
    load_hf_state_dict(layer, tensors)
    for i, (name, value) in enumerate(layer.state_dict().items()):
        assert torch.equal(value, torch.full_like(value, float(i))), name


@each_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip_is_bit_identical(config, dtype) -> None:
    source, target = build(config, dtype=dtype), build(config, dtype=dtype)
    exported = to_hf_state_dict(source, "model.layers.3.self_attn.")
    assert set(exported) == {f"model.layers.3.self_attn.{NAMES[name]}" for name in source.state_dict()}
    load_hf_state_dict(target, exported, "model.layers.3.self_attn.")
    assert same_bits(weights_of(source), weights_of(target))
    assert same_bits(exported, to_hf_state_dict(target, "model.layers.3.self_attn."))


@each_config
def test_each_key_is_needed(config) -> None:
    layer = build(config)
    before, exported = weights_of(layer), to_hf_state_dict(build(config))
    for key in exported:
        with pytest.raises(ValueError, match=rf"missing: {re.escape(key)}$"):
            load_hf_state_dict(layer, {name: value for name, value in exported.items() if name != key})
    assert same_bits(before, weights_of(layer))


@pytest.mark.parametrize(
    "extra", ["q_proj.weight", "q_a_proj.bias", "o_proj.weight_scale_inv", "rotary_emb.cos", "indexer.wk.weight"]
)
def test_a_key_without_a_parameter_is_refused(extra) -> None:
    layer = build(tiny())
    before = weights_of(layer)
    exported = {f"a.{name}": value for name, value in to_hf_state_dict(build(tiny())).items()}
    with pytest.raises(ValueError, match=rf"unexpected: a\.{re.escape(extra)}$"):
        load_hf_state_dict(layer, {**exported, f"a.{extra}": torch.ones(1)}, "a.")
    assert same_bits(before, weights_of(layer))


def test_a_shared_layer_refuses_indexer_weights() -> None:
    exported = to_hf_state_dict(build(tiny(**DSA)))
    with pytest.raises(ValueError, match=r"unexpected: indexer\.wq_b\.weight, indexer\.wk\.weight"):
        load_hf_state_dict(build(tiny(**DSA, dsa_indexer_shared=True)), exported)


def test_a_layer_without_query_compression_is_not_fed_a_compressed_one() -> None:
    with pytest.raises(ValueError, match=r"missing: q_proj\.weight; unexpected: q_a_proj\.weight, q_a_layernorm"):
        load_hf_state_dict(build(tiny(q_lora_rank=None)), to_hf_state_dict(build(tiny())))


def test_rotary_width_from_head_dim_is_refused_with_both_shapes() -> None:
    """Case A3: with `head_dim` 192 taken for the rotary width, kv_a has 512 + 192 = 704 rows."""
    exported = to_hf_state_dict(build(tiny(kv_lora_rank=512, qk_pos_emb_head_dim=64)))
    exported["kv_a_proj_with_mqa.weight"] = torch.zeros(704, tiny().hidden_size)
    layer = build(tiny(kv_lora_rank=512, qk_pos_emb_head_dim=64))
    with pytest.raises(ValueError, match=r"kv_a_proj_with_mqa\.weight is \[704, 64\], expected \[576, 64\]"):
        load_hf_state_dict(layer, exported)


def test_one_error_names_everything_and_nothing_is_written() -> None:
    layer = build(tiny())
    before, tensors = weights_of(layer), to_hf_state_dict(build(tiny()))
    del tensors["q_a_proj.weight"]
    tensors["o_proj.weight"] = tensors["o_proj.weight"].T.contiguous()[1:]
    tensors["q_b_proj.weight"] = tensors["q_b_proj.weight"].to(torch.int8)
    tensors["q_c_proj.weight"] = torch.ones(1)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        load_hf_state_dict(layer, tensors)
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "missing: q_a_proj",
        "unexpected: q_c_proj",
        "misshapen: o_proj",
        "q_b_proj.weight has dtype torch.int8",
    ):
        assert part in message
    assert same_bits(before, weights_of(layer))


def test_other_modules_keys_are_left_alone() -> None:
    layer, other = build(tiny()), build(tiny())
    tensors = to_hf_state_dict(other, "model.layers.3.self_attn.")
    tensors |= {"model.layers.30.self_attn.o_proj.weight": torch.ones(1), "model.norm.weight": torch.ones(1)}
    tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    load_hf_state_dict(layer, tensors, "model.layers.3.self_attn.")
    assert same_bits(weights_of(layer), weights_of(other))


def test_a_prefix_that_nothing_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"prefix 'model\.layers\.61\.'"):
        load_hf_state_dict(build(tiny()), to_hf_state_dict(build(tiny()), "model.layers.3."), "model.layers.61.")


def test_dtypes_are_cast_once() -> None:
    half, full = build(tiny(), dtype=torch.bfloat16), build(tiny())
    load_hf_state_dict(full, to_hf_state_dict(half))
    assert all(torch.equal(value, half.state_dict()[name].float()) for name, value in full.state_dict().items())
    full = build(tiny())
    load_hf_state_dict(half, to_hf_state_dict(full))
    assert all(torch.equal(value, full.state_dict()[name].bfloat16()) for name, value in half.state_dict().items())


def test_parameters_stay_the_same_trainable_objects() -> None:
    layer = build(tiny())
    before = dict(layer.named_parameters())
    load_hf_state_dict(layer, to_hf_state_dict(build(tiny())))
    assert all(parameter is before[name] and parameter.requires_grad for name, parameter in layer.named_parameters())
    assert not any(value.requires_grad for value in to_hf_state_dict(layer).values())


def test_a_layer_on_meta_is_refused() -> None:
    with pytest.raises(ValueError, match=r"linear_\w+\.weight is on the meta device: call module\.to_empty"):
        load_hf_state_dict(build(tiny(), device="meta"), to_hf_state_dict(build(tiny())))


@pytest.mark.parametrize(
    ("value", "said"),
    [([1.0, 2.0], "o_proj.weight (list)"), (torch.ones(1, device="meta"), "meta device are a.o_proj")],
)
def test_values_that_hold_no_weights_are_refused(value, said) -> None:
    tensors = {**to_hf_state_dict(build(tiny()), "a."), "a.o_proj.weight": value}
    with pytest.raises(ValueError, match=re.escape(said)):
        load_hf_state_dict(build(tiny()), tensors, "a.")


def test_a_parameter_that_no_checkpoint_knows_is_refused() -> None:
    layer = build(tiny())
    layer.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has the parameter adapter\.weight, which no checkpoint entry describes"):
        to_hf_state_dict(layer)


def test_a_long_list_of_keys_is_cut_with_its_count() -> None:
    tensors = to_hf_state_dict(build(tiny())) | {f"experts.{i}.weight": torch.ones(1) for i in range(300)}
    with pytest.raises(ValueError, match=r"experts\.7\.weight and 292 more$"):
        load_hf_state_dict(build(tiny()), tensors)
