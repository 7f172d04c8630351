"""Our layer equals transformers' DeepseekV2Attention, which rotates complex numbers, with the same weights."""

import pytest
import torch

from tests.parity.transformers_layers import (
    DIMS,
    PLAIN,
    YARN,
    assert_same,
    assert_same_tables,
    build_pair,
    error,
    published,
    random_tokens,
    run_ours,
    run_theirs,
    swap_rotary_rows,
)

V2_YARN = {**YARN, "rope_scaling": {**YARN["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707}}
each_rope = pytest.mark.parametrize("rope", [PLAIN, V2_YARN], ids=["plain", "yarn"])
each_rank = pytest.mark.parametrize("q_lora_rank", [48, None], ids=["V2", "V2-Lite"])


@each_rope
@each_rank
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_forward_and_every_gradient(rope, backend, q_lora_rank) -> None:
    config = published("deepseek_v2", q_lora_rank=q_lora_rank, **rope)
    pair = build_pair(config, core_attention_backend=backend)
    tokens = random_tokens()
    assert_same(run_ours(pair, *tokens), run_theirs(pair, *tokens))


@each_rope
def test_tables_and_scale(rope) -> None:
    pair = build_pair(published("deepseek_v2", **rope))
    assert_same_tables(pair)
    assert pair.ours.softmax_scale == pytest.approx(pair.theirs.scaling, rel=1e-12)


@each_rank
def test_rotary_rows_stay_in_interleaved_pairs(q_lora_rank) -> None:
    """Case A2, against a rotation of complex numbers: reordering the query's rotary rows alone changes the output."""
    pair = build_pair(published("deepseek_v2", q_lora_rank=q_lora_rank, **PLAIN))
    tokens = random_tokens()
    theirs = run_theirs(pair, *tokens)
    assert_same(run_ours(pair, *tokens), theirs)
    head = DIMS["qk_nope_head_dim"] + DIMS["qk_rope_head_dim"]
    weight = (pair.ours.linear_q_up_proj if q_lora_rank else pair.ours.linear_q_proj).weight
    with torch.no_grad():
        weight.copy_(swap_rotary_rows(weight, DIMS["qk_nope_head_dim"], DIMS["qk_rope_head_dim"], head))
    assert error(run_ours(pair, *tokens).output, theirs.output) > 1e-2
