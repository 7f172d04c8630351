"""The spellings of Megatron-LM checkpoints."""

import io
import re

import pytest
import torch
from torch import Tensor, nn

from mla_attention.checkpoint import (
    load_hf_state_dict,
    load_megatron_state_dict,
    to_hf_state_dict,
    to_megatron_state_dict,
)
from mla_attention.checkpoint.files import InMemory
from mla_attention.checkpoint.megatron import MergedHeads
from mla_attention.configs import tiny
from tests.mla_attention.checkpoint.layers import CONFIGS, build, same_bits, weights_of

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def split_heads(weight: Tensor, heads: int, key_dim: int) -> tuple[Tensor, Tensor]:
    """Return the key rows and the value rows of a joint up projection, head by head."""
    per_head = weight.view(heads, -1, weight.shape[1])
    return per_head[:, :key_dim].flatten(0, 1).clone(), per_head[:, key_dim:].flatten(0, 1).clone()


@each_config
@pytest.mark.parametrize("fused_norm", [False, True])
def test_round_trip_is_bit_identical_in_both_spellings(config, fused_norm) -> None:
    source, target = build(config), build(config)
    exported = to_megatron_state_dict(source, "decoder.layers.0.self_attention.", fused_norm=fused_norm)
    expected = set(source.state_dict())
    if fused_norm:
        expected = {
            re.sub(r"^(q|kv)_layernorm\.weight", r"linear_\1_up_proj.layer_norm_weight", key) for key in expected
        }
    assert set(exported) == {f"decoder.layers.0.self_attention.{key}" for key in expected}
    load_megatron_state_dict(target, exported, "decoder.layers.0.self_attention.")
    assert same_bits(weights_of(source), weights_of(target))


def test_extra_states_and_rotary_frequencies_are_ignored() -> None:
    source, target = build(tiny()), build(tiny())
    tensors = dict(source.state_dict())
    tensors |= {"linear_proj._extra_state": io.BytesIO(), "core_attention._extra_state": None}
    tensors |= {"linear_q_up_proj._extra_state": torch.ones(2), "rotary_pos_emb.inv_freq": torch.ones(4)}
    load_megatron_state_dict(target, tensors)
    assert same_bits(weights_of(source), weights_of(target))


def test_split_key_and_value_up_projections_are_merged_head_by_head() -> None:
    config = tiny()
    source, target = build(config), build(config)
    tensors = dict(source.state_dict())
    key, value = split_heads(tensors.pop("linear_kv_up_proj.weight"), config.num_attention_heads, config.qk_head_dim)
    tensors |= {"linear_k_up_proj.weight": key, "linear_v_up_proj.weight": value}
    load_megatron_state_dict(target, tensors)
    assert same_bits(weights_of(source), weights_of(target))


@pytest.mark.parametrize("rows", [(0, 20), (3, 4), (4, 9), (5, 5), (20, 20), (11, 19)])
def test_any_rows_of_merged_heads(rows) -> None:
    joint = torch.randn(20, 6)  # 4 heads of 3 key rows and 2 value rows
    key, value = split_heads(joint, 4, 3)
    merged = MergedHeads(InMemory(key), InMemory(value), 3, 2)
    assert torch.equal(merged.read((slice(*rows), slice(1, 4))), joint[slice(*rows), 1:4])


def test_a_fused_down_projection_is_cut_into_query_and_key_value_rows() -> None:
    source, target = build(tiny()), build(tiny())
    tensors = dict(source.state_dict())
    parts = [tensors.pop("linear_q_down_proj.weight"), tensors.pop("linear_kv_down_proj.weight")]
    tensors["linear_qkv_down_proj.weight"] = torch.cat(parts)
    load_megatron_state_dict(target, tensors)
    assert same_bits(weights_of(source), weights_of(target))


def test_a_module_with_its_norms_in_the_up_projections() -> None:
    """Transformer Engine's LayerNormLinear holds the norm's weight itself, beside an extra state."""
    layer, source = build(tiny()), build(tiny())
    for kind in ("q", "kv"):
        norm, projection = getattr(layer, f"{kind}_layernorm"), getattr(layer, f"linear_{kind}_up_proj")
        projection.layer_norm_weight = nn.Parameter(norm.weight.detach().clone())
        projection.get_extra_state = dict
        delattr(layer, f"{kind}_layernorm")
    load_hf_state_dict(layer, to_hf_state_dict(source))
    assert torch.equal(layer.linear_kv_up_proj.layer_norm_weight, source.kv_layernorm.weight)
    for export in (to_hf_state_dict, to_megatron_state_dict):
        assert same_bits(export(layer), export(source))
    for fused_norm in (False, True):
        load_megatron_state_dict(layer, to_megatron_state_dict(source, fused_norm=fused_norm))


def faults() -> dict[str, tuple[dict[str, Tensor | None], str]]:
    c = tiny()
    n, latent, width = c.num_attention_heads, c.kv_lora_rank, c.hidden_size
    key, value = torch.ones(n * c.qk_head_dim, latent), torch.ones(n * c.v_head_dim, latent)
    down = torch.ones(c.q_lora_rank + latent + c.qk_pos_emb_head_dim, width)
    no_kv_up: dict[str, Tensor | None] = {"linear_kv_up_proj.weight": None}
    no_downs: dict[str, Tensor | None] = {"linear_q_down_proj.weight": None, "linear_kv_down_proj.weight": None}
    return {
        "missing": ({"linear_proj.weight": None}, "missing: m.linear_proj.weight"),
        "unexpected": ({"input_layernorm.weight": torch.ones(width)}, "unexpected: m.input_layernorm.weight"),
        "misshapen": ({"linear_proj.weight": torch.ones(3, 3)}, "misshapen: m.linear_proj.weight is [3, 3]"),
        "norm spelled twice": (
            {"linear_q_up_proj.layer_norm_weight": torch.ones(c.q_lora_rank)},
            "m.q_layernorm.weight and m.linear_q_up_proj.layer_norm_weight both hold q_layernorm.weight",
        ),
        "misshapen fused norm": (
            {"q_layernorm.weight": None, "linear_q_up_proj.layer_norm_weight": torch.ones(3)},
            "misshapen: m.linear_q_up_proj.layer_norm_weight is [3]",
        ),
        "values without keys": (no_kv_up | {"linear_v_up_proj.weight": value}, "missing: m.linear_k_up_proj.weight"),
        "misshapen values": (
            no_kv_up | {"linear_k_up_proj.weight": key, "linear_v_up_proj.weight": value[1:]},
            f"m.linear_v_up_proj.weight is [{n * c.v_head_dim - 1}, {latent}], expected [{n * c.v_head_dim}, {latent}]",
        ),
        "joint and split": (
            {"linear_k_up_proj.weight": key, "linear_v_up_proj.weight": value},
            "m.linear_kv_up_proj.weight and m.linear_k_up_proj.weight both hold linear_kv_up_proj.weight",
        ),
        "misshapen fused down": (
            no_downs | {"linear_qkv_down_proj.weight": down[2:]},
            f"misshapen: m.linear_qkv_down_proj.weight is [{len(down) - 2}, {width}], expected [{len(down)}, {width}]",
        ),
        "fused and plain down": (
            {"linear_q_down_proj.weight": None, "linear_qkv_down_proj.weight": down},
            "m.linear_kv_down_proj.weight and m.linear_qkv_down_proj.weight both hold linear_kv_down_proj.weight",
        ),
        "FP8": (
            {"linear_proj.weight": torch.ones(width, n * c.v_head_dim).to(torch.float8_e4m3fn)},
            "m.linear_proj.weight has dtype torch.float8_e4m3fn, allowed are torch.float64",
        ),
        "the layer's input norm": (
            {"linear_qkv_down_proj.layer_norm_weight": torch.ones(width)},
            "unexpected: m.linear_qkv_down_proj.layer_norm_weight",
        ),
    }


@pytest.mark.parametrize(("changes", "said"), faults().values(), ids=faults().keys())
def test_a_wrong_checkpoint_is_refused_and_nothing_is_written(changes, said) -> None:
    layer = build(tiny())
    before = weights_of(layer)
    tensors = build(tiny()).state_dict() | changes
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_megatron_state_dict(
            layer, {f"m.{key}": value for key, value in tensors.items() if value is not None}, "m."
        )
    assert "\n" not in str(error.value)
    assert same_bits(before, weights_of(layer))


def test_a_fused_down_projection_is_unexpected_without_query_compression() -> None:
    layer = build(tiny(q_lora_rank=None))
    with pytest.raises(ValueError, match=r"unexpected: linear_qkv_down_proj\.weight"):
        load_megatron_state_dict(layer, {**layer.state_dict(), "linear_qkv_down_proj.weight": torch.ones(2, 2)})
