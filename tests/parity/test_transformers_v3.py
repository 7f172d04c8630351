"""Our layer equals transformers' DeepseekV3Attention (Kimi-K2's too) with the same weights."""

import pytest
import torch

from tests.parity.transformers_layers import (
    BATCH,
    DIMS,
    LENGTH,
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

KIMI = {
    "rope_theta": 50000.0,
    "rope_scaling": {**YARN["rope_scaling"], "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}
each_rope = pytest.mark.parametrize("rope", [PLAIN, YARN, KIMI], ids=["plain", "yarn", "kimi"])
each_backend = pytest.mark.parametrize("backend", ["reference", "sdpa"])


@each_rope
@each_backend
@pytest.mark.parametrize("q_lora_rank", [48, None])
def test_forward_and_every_gradient(rope, backend, q_lora_rank) -> None:
    config = published("deepseek_v3", q_lora_rank=q_lora_rank, **rope)
    pair = build_pair(config, core_attention_backend=backend)
    tokens = random_tokens()
    assert_same(run_ours(pair, *tokens), run_theirs(pair, *tokens))


@each_rope
def test_tables_and_scale(rope) -> None:
    pair = build_pair(published("deepseek_v3", **rope))
    assert_same_tables(pair)
    assert pair.ours.softmax_scale == pytest.approx(pair.theirs.scaling, rel=1e-12)


def test_positions_of_each_sequence() -> None:
    pair = build_pair(published("deepseek_v3", **YARN))
    positions = torch.randint(0, 200, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    tokens = random_tokens()
    ours = run_ours(pair, *tokens, position_ids=positions)
    assert_same(ours, run_theirs(pair, *tokens, positions=positions))
    assert error(ours.output, run_ours(pair, *tokens).output) > 1e-2


@pytest.mark.parametrize(
    "overrides", [{"kv_assembly": "gemm"}, {"recompute_up_proj": True}, {"mla_down_proj_fusion": True}]
)
def test_the_layers_variants(overrides) -> None:
    pair = build_pair(published("deepseek_v3", **YARN), **overrides)
    tokens = random_tokens()
    assert_same(run_ours(pair, *tokens), run_theirs(pair, *tokens))


def test_rotary_rows_stay_in_interleaved_pairs() -> None:
    """Case A2: reordering the rotary rows of q_b alone, as a second permutation would, changes the output."""
    pair = build_pair(published("deepseek_v3", **PLAIN))
    tokens = random_tokens()
    theirs = run_theirs(pair, *tokens)
    assert_same(run_ours(pair, *tokens), theirs)
    head = DIMS["qk_nope_head_dim"] + DIMS["qk_rope_head_dim"]
    weight = pair.ours.linear_q_up_proj.weight
    with torch.no_grad():
        weight.copy_(swap_rotary_rows(weight, DIMS["qk_nope_head_dim"], DIMS["qk_rope_head_dim"], head))
    assert error(run_ours(pair, *tokens).output, theirs.output) > 1e-2


def test_their_other_pairing_is_another_layer() -> None:
    """Negative control: rope_interleave=False of theirs rotates the same weights in halves."""
    pair = build_pair(published("deepseek_v3", **PLAIN))
    tokens = random_tokens()
    pair.theirs.config.rope_interleave = False
    assert error(run_ours(pair, *tokens).output, run_theirs(pair, *tokens).output) > 1e-2
