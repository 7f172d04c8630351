"""Parity in bf16 on a GPU: our layers are no further from transformers' fp32 layers than their own bf16 ones are."""

import copy
from dataclasses import replace

import pytest
import torch

from mla_attention import PackedSeqParams
from tests.parity.transformers_layers import (
    BATCH,
    PLAIN,
    YARN,
    build_pair,
    published,
    random_tokens,
    run_ours,
    run_theirs,
    swap_rotary_rows,
)

pytestmark = pytest.mark.gpu

# The published head dims and rope; hidden size, heads and ranks small. GLM-5's top-k is above the length.
SMALL = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256}
SMALL |= {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "max_position_embeddings": 163840}
V3_ROPE = {**YARN, "rope_scaling": {**YARN["rope_scaling"], "original_max_position_embeddings": 4096}}
CONFIGS = {
    "deepseek_v3": published("deepseek_v3", **{**SMALL, **V3_ROPE, "qk_nope_head_dim": 128, "v_head_dim": 128}),
    "glm_moe_dsa": published(
        "glm_moe_dsa",
        **{**SMALL, **PLAIN, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128},
    ),
}
LENGTH = 200


def pair_and_tokens(family, **overrides):
    pair = build_pair(
        CONFIGS[family], device="cuda", dtype=torch.bfloat16, any_release=True, apply_rope_fusion=True, **overrides
    )
    return pair, [t.cuda().bfloat16() for t in random_tokens(LENGTH, SMALL["hidden_size"])]


def named(results):
    """Output and gradients by name; those that there are."""
    found = {"output": results.output, "hidden": results.input_gradient, **results.gradients}
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def theirs_in_bf16_and_fp32(pair, hidden, gradient):
    wide = replace(pair, theirs=copy.deepcopy(pair.theirs).float())
    return named(run_theirs(pair, hidden, gradient)), named(run_theirs(wide, hidden.float(), gradient.float()))


def run_ours_packed(pair, hidden, gradient):
    """The sequences of the batch end to end."""
    offsets = torch.arange(BATCH + 1, device="cuda", dtype=torch.int32) * LENGTH
    rows = [t.transpose(0, 1).reshape(BATCH * LENGTH, 1, -1) for t in (hidden, gradient)]
    results = run_ours(pair, *rows, packed_seq_params=PackedSeqParams(offsets))
    results.output, results.input_gradient = (
        t.view(BATCH, LENGTH, -1).transpose(0, 1) for t in (results.output, results.input_gradient)
    )
    return results


def errors(found, exact):
    """The norm of each tensor's error, relative to its own."""
    assert found.keys() == exact.keys()
    return {name: ((found[name].float() - t).norm() / t.norm()).item() for name, t in exact.items()}


def further(ours, theirs):
    """Names of tensors whose error is larger than theirs: by more than a quarter, and more than fp32 rounding."""
    return [name for name, error in ours.items() if not error <= 1.25 * theirs[name] + 1e-6]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("run", [run_ours, run_ours_packed])
@pytest.mark.parametrize("overrides", [{}, {"kv_assembly": "split"}, {"recompute_up_proj": True}])
def test_no_further_from_their_fp32_layer_than_their_bf16_layer(family, run, overrides):
    pair, tokens = pair_and_tokens(family, **overrides)
    theirs, exact = theirs_in_bf16_and_fp32(pair, *tokens)
    ours, theirs = errors(named(run(pair, *tokens)), exact), errors(theirs, exact)
    assert max(theirs.values()) < 5e-2
    assert further(ours, theirs) == [], (ours, theirs)


def test_another_order_of_the_rotary_rows_is_seen():
    """Negative control: the query's rotary rows in halves, not in pairs."""
    pair, tokens = pair_and_tokens("deepseek_v3")
    theirs, exact = theirs_in_bf16_and_fp32(pair, *tokens)
    weight = pair.ours.linear_q_up_proj.weight
    with torch.no_grad():
        weight.copy_(swap_rotary_rows(weight, 128, 64, 192))
    assert "output" in further(errors(named(run_ours(pair, *tokens)), exact), errors(theirs, exact))
