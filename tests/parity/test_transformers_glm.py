"""Our dsa layer equals transformers' GlmMoeDsaAttention with the same weights, dense and sparse."""

import pytest
import torch

from tests.parity.transformers_layers import (
    LENGTH,
    PLAIN,
    assert_same,
    assert_same_tables,
    build_pair,
    error,
    published,
    random_tokens,
    run_ours,
    run_theirs,
    swap_rotary_rows,
    visible_sets,
)

each_backend = pytest.mark.parametrize("backend", ["reference", "sdpa"])
each_topk = pytest.mark.parametrize("topk", [1, 7, LENGTH - 1, LENGTH, 2048])


@each_backend
@each_topk
def test_forward_every_gradient_and_selection(backend, topk) -> None:
    pair = build_pair(published("glm_moe_dsa", index_topk=topk, **PLAIN), core_attention_backend=backend)
    tokens = random_tokens()
    ours, theirs = run_ours(pair, *tokens), run_theirs(pair, *tokens)
    assert_same(ours, theirs, one_key=topk == 1)
    assert visible_sets(ours.topk_indices) == visible_sets(theirs.topk_indices)


@pytest.mark.parametrize("seed", range(4))
def test_other_weights_and_tokens(seed) -> None:
    pair = build_pair(published("glm_moe_dsa", index_topk=5, **PLAIN), seed=seed)
    tokens = random_tokens(17 + seed, seed=seed)
    assert_same(run_ours(pair, *tokens), run_theirs(pair, *tokens))


def test_tables_and_scale() -> None:
    pair = build_pair(published("glm_moe_dsa", **PLAIN))
    assert_same_tables(pair)
    assert pair.ours.softmax_scale == pytest.approx(pair.theirs.scaling, rel=1e-12)


@pytest.mark.parametrize(
    "overrides", [{"kv_assembly": "gemm"}, {"recompute_up_proj": True}, {"mla_down_proj_fusion": True}]
)
@pytest.mark.parametrize("topk", [7, 2048])
def test_the_layers_variants(overrides, topk) -> None:
    pair = build_pair(published("glm_moe_dsa", index_topk=topk, **PLAIN), **overrides)
    tokens = random_tokens()
    assert_same(run_ours(pair, *tokens), run_theirs(pair, *tokens))


def test_a_shared_layer_takes_the_indices_of_an_earlier_one() -> None:
    """GLM-5.2: layer 3 runs its indexer, layer 4 reuses the selection."""
    config = published("glm_moe_dsa", index_topk=7, indexer_types=["full"] * 4 + ["shared"] + ["full"] * 3, **PLAIN)
    full, shared = build_pair(config, layer_idx=3), build_pair(config, layer_idx=4, seed=1)
    assert shared.ours.config.dsa_indexer_shared
    tokens, more = random_tokens(), random_tokens(seed=3)
    theirs = run_theirs(full, *tokens)
    expected = run_theirs(shared, *more, prev_topk_indices=theirs.topk_indices)
    for indices in (theirs.topk_indices, run_ours(full, *tokens).topk_indices):
        assert_same(run_ours(shared, *more, topk_indices=indices), expected)


@pytest.mark.parametrize("overrides", [{"dsa_indexer_rope_interleaved": False}, {"dsa_indexer_scoring_relu": False}])
def test_another_indexer_selects_other_keys(overrides) -> None:
    """Case A1, negative control: the indexer's pairing and ReLU show only where there are more keys than K."""
    tokens = random_tokens()
    for topk, differs in ((7, True), (LENGTH, False)):
        pair = build_pair(published("glm_moe_dsa", index_topk=topk, **PLAIN), **overrides)
        ours, theirs = run_ours(pair, *tokens), run_theirs(pair, *tokens)
        assert (visible_sets(ours.topk_indices) != visible_sets(theirs.topk_indices)) is differs
        assert (error(ours.output, theirs.output) > 1e-2) is differs


@pytest.mark.parametrize("side", ["query", "key"])
def test_one_side_of_the_indexer_in_another_pairing_selects_other_keys(side) -> None:
    """Case A1, queries and keys apart: only both together may be reordered, with the flag."""
    pair = build_pair(published("glm_moe_dsa", index_topk=7, **PLAIN))
    tokens = random_tokens()
    expected = visible_sets(run_theirs(pair, *tokens).topk_indices)
    reorder_indexer(pair.ours, side)
    assert visible_sets(run_ours(pair, *tokens).topk_indices) != expected


def test_both_sides_reordered_with_the_flag_select_the_same_keys() -> None:
    config = published("glm_moe_dsa", index_topk=7, **PLAIN)
    pair = build_pair(config, dsa_indexer_rope_interleaved=False)
    tokens = random_tokens()
    for side in ("query", "key"):
        reorder_indexer(pair.ours, side)
    assert_same(run_ours(pair, *tokens), run_theirs(pair, *tokens))


def test_the_indexer_takes_the_normed_latent() -> None:
    """Case F6: with the query norm's weight far from one, the raw latent would select other keys."""
    pair = build_pair(published("glm_moe_dsa", index_topk=7, **PLAIN))
    spread = torch.linspace(0.2, 3.0, pair.theirs.q_a_layernorm.weight.numel())
    with torch.no_grad():
        pair.theirs.q_a_layernorm.weight.copy_(spread)
        pair.ours.q_layernorm.weight.copy_(spread)
    tokens = random_tokens()
    ours, theirs = run_ours(pair, *tokens), run_theirs(pair, *tokens)
    assert_same(ours, theirs)
    raw = pair.theirs.q_a_proj(tokens[0].transpose(0, 1))
    normed = pair.theirs.q_a_layernorm(raw)
    hook = pair.theirs.indexer.register_forward_pre_hook(lambda module, args: (args[0], raw, *args[2:]))
    other = run_theirs(pair, *tokens)
    hook.remove()
    assert not torch.equal(raw, normed)
    assert visible_sets(other.topk_indices) != visible_sets(ours.topk_indices)


def reorder_indexer(layer, side: str) -> None:
    """Reorder the indexer's rotary channels of one side from interleaved pairs to halves."""
    indexer, width = layer.core_attention.indexer, layer.config.qk_pos_emb_head_dim
    if side == "query":
        tensors = [indexer.linear_wq_b.weight]
    else:
        tensors = [indexer.linear_wk.weight, indexer.k_norm.weight, indexer.k_norm.bias]
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(swap_rotary_rows(tensor, 0, width, layer.config.dsa_indexer_head_dim))
