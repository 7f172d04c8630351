"""Our dsa layer equals transformers' DeepseekV32Attention with the same weights, dense and sparse."""

import pytest

from tests.parity.transformers_layers import (
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
    visible_sets,
)

each_rope = pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])


@each_rope
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("topk", [1, 7, LENGTH - 1, LENGTH, 2048])
def test_forward_every_gradient_and_selection(rope, backend, topk) -> None:
    pair = build_pair(published("deepseek_v32", index_topk=topk, **rope), core_attention_backend=backend)
    tokens = random_tokens()
    ours, theirs = run_ours(pair, *tokens), run_theirs(pair, *tokens)
    assert_same(ours, theirs, one_key=topk == 1)
    assert visible_sets(ours.topk_indices) == visible_sets(theirs.topk_indices)


@each_rope
def test_tables_and_scale(rope) -> None:
    pair = build_pair(published("deepseek_v32", **rope))
    assert_same_tables(pair)
    assert pair.ours.softmax_scale == pytest.approx(pair.theirs.scaling, rel=1e-12)


def test_the_indexer_rotates_in_halves_and_the_layer_in_pairs() -> None:
    """Case A1, negative control: the main path's pairing in the indexer selects other keys."""
    pair = build_pair(published("deepseek_v32", index_topk=7, **YARN), dsa_indexer_rope_interleaved=True)
    tokens = random_tokens()
    ours, theirs = run_ours(pair, *tokens), run_theirs(pair, *tokens)
    assert visible_sets(ours.topk_indices) != visible_sets(theirs.topk_indices)
    assert error(ours.output, theirs.output) > 1e-2


def test_the_hadamard_rotation_changes_no_selection() -> None:
    """Case F8: an orthonormal rotation of both sides; theirs leaves it out."""
    pair = build_pair(published("deepseek_v32", index_topk=7, **YARN), dsa_indexer_rotate_activation=True)
    tokens = random_tokens()
    assert_same(run_ours(pair, *tokens), run_theirs(pair, *tokens))
