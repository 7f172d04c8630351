"""indexer_topk: tiles of query rows change nothing; the set is that of the whole score matrix."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_attention.fusions import indexer_scores, indexer_topk, reference
from mla_attention.fusions.dsa.indexer_topk import row_tiles
from tests.fusions.dsa import selection_oracles as oracles
from tests.guards import guarded_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("function", [indexer_topk, reference.indexer_topk], ids=["kernel", "twin"])


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def draw(rows, keys, heads=2, width=16, dtype=torch.float32):
    q = torch.randn(rows, heads, width, device=DEVICE).to(dtype)
    k = torch.randn(keys, width, device=DEVICE).to(dtype)
    return q, k, torch.randn(rows, heads, device=DEVICE)


def twin_of(function):
    """The score function that belongs to a selection."""
    return reference.indexer_scores if function is reference.indexer_topk else indexer_scores


@pytest.mark.parametrize("tokens", [1, 2, 17, 2047, 2048, 2049])
@pytest.mark.parametrize("topk", [1, 8, 2048])
def test_twin_takes_any_number_of_tokens_and_any_topk(tokens, topk):
    q, k, weights = draw(tokens, tokens, 1, 8)
    selected = reference.indexer_topk(q, k, weights, topk, budget_bytes=2**20)
    assert selected.shape == (tokens, min(topk, tokens))
    counts = torch.arange(1, tokens + 1, device=DEVICE).clamp(max=topk)
    assert torch.equal((selected >= 0).sum(-1), counts)
    assert (selected <= torch.arange(tokens, device=DEVICE)[:, None]).all()
    dense = counts.tolist()[: topk + 1]
    for row in range(min(tokens, topk)):
        if row in (0, 1, 5, tokens - 1):
            assert selected[row, : dense[row]].tolist() == list(range(row + 1))


@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("topk", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_takes_any_number_of_tokens_and_any_topk(tokens, topk, dtype):
    inputs = draw(tokens, tokens, 3, 20, dtype)
    with guarded_allocations():
        selected = indexer_topk(*inputs, topk)
    assert torch.equal(selected, oracles.select(indexer_scores(*inputs), topk))
    if topk >= tokens:
        every = torch.arange(tokens, device=DEVICE).expand(tokens, -1)
        assert torch.equal(selected, torch.where(every <= every.t(), every, -1))


@BOTH
def test_selected_set_is_that_of_the_scores_with_ties_to_the_lower_index(function):
    q, k, weights = draw(24, 24, 1, 8)  # with one head, half of the products are cut to an exact zero
    selected = function(q, k, weights, 10)
    scores = twin_of(function)(q, k, weights)
    assert (scores == 0).sum() > 50
    assert torch.equal(selected, oracles.select(scores, 10))


@BOTH
def test_tile_size_never_changes_the_set(function):
    inputs = draw(21, 21, 2, 16)
    whole = function(*inputs, 9)
    for rows in (0, 2, 7):
        assert torch.equal(function(*inputs, 9, budget_bytes=max(1, rows * 24 * 4 * 2)), whole)
    offsets = torch.tensor([0, 3, 17, 20], device=DEVICE)
    packed = function(*inputs, 9, cu_seqlens=offsets)
    assert torch.equal(function(*inputs, 9, cu_seqlens=offsets, budget_bytes=900), packed)


@BOTH
def test_chunks_with_positions_equal_the_whole(function):
    q, k, weights = draw(20, 20, 2, 16)
    whole = function(q, k, weights, 6)
    for rows in (torch.arange(11, 16), torch.tensor([19, 3, 3, 0])):
        rows = rows.to(DEVICE)
        assert torch.equal(function(q[rows], k, weights[rows], 6, q_positions=rows), whole[rows])
    offsets = torch.tensor([0, 9, 9, 20], device=DEVICE)
    packed = function(q, k, weights, 6, cu_seqlens=offsets)
    shard = torch.tensor([0, 1, 8, 9, 19, 14], device=DEVICE)
    found = function(q[shard], k, weights[shard], 6, cu_seqlens=offsets, q_positions=shard, budget_bytes=500)
    assert torch.equal(found, packed[shard])


@BOTH
def test_later_tokens_leave_earlier_rows_unchanged(function):
    q, k, weights = draw(16, 16, 2, 16)
    before = function(q, k, weights, 5)
    for tensor in (q, k, weights):
        tensor[11:] = math.nan
    assert torch.equal(function(q, k, weights, 5)[:11], before[:11])


@BOTH
@pytest.mark.parametrize("lengths", [(1, 2, 10, 11), (12, 1, 0, 5)])
def test_selection_never_crosses_a_sequence(function, lengths):
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    q, k, weights = draw(total + 2, total + 2)  # two rows past the last offset
    packed = function(q, k, weights, 8, cu_seqlens=offsets)
    assert (packed[total:] == -1).all()
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        alone = function(q[first:last], k[first:last], weights[first:last], 8)
        width = alone.shape[1]
        assert torch.equal(packed[first:last, :width], torch.where(alone >= 0, alone + first, -1))
        assert (packed[first:last, width:] == -1).all()


@BOTH
def test_rows_that_see_nothing_select_nothing(function):
    q, k, weights = draw(4, 9)
    positions = torch.tensor([-1, 8, -1, 0], device=DEVICE)
    selected = function(q, k, weights, 3, q_positions=positions)
    assert (selected[[0, 2]] == -1).all()
    assert selected[3].tolist() == [0, -1, -1]


@BOTH
def test_more_rows_than_keys(function):
    q, k, weights = draw(9, 4)
    selected = function(q, k, weights, 3)
    assert torch.equal(selected, oracles.select(twin_of(function)(q, k, weights), 3))


@BOTH
def test_negative_controls_change_the_set(function):
    q, k, weights = draw(16, 16, 3, 16)
    selected = function(q, k, weights, 5)
    assert not torch.equal(function(q, k, weights, 5, relu=False), selected)
    pairs = torch.arange(16, device=DEVICE).view(2, 8).t().flatten()  # as if k were paired otherwise than q
    assert not torch.equal(function(q, k[:, pairs], weights, 5), selected)
    assert torch.equal(function(q[..., pairs], k[:, pairs], weights, 5)[:5], selected[:5])


@BOTH
def test_nothing_in_nothing_out(function):
    for rows, keys in ((0, 4), (4, 0), (0, 0)):
        assert function(*draw(rows, keys), 3).shape == (rows, min(3, keys))


@BOTH
def test_no_gradient_is_recorded(function):
    q, k, weights = (tensor.requires_grad_() for tensor in draw(4, 4))
    assert not function(q, k, weights, 2).requires_grad


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (100, 100), (1000, 1000), (70, 300), (300, 70)])
@pytest.mark.parametrize("budget", [1, 50, 1000, 12345, 10**6])
def test_row_tiles_cover_all_rows_within_the_budget(causal, rows, keys, budget):
    tiles = list(row_tiles(rows, keys, causal=causal, budget_elements=budget))
    assert [first for first, _, _ in tiles] == [0, *(end for _, end, _ in tiles[:-1])]
    assert tiles[-1][1] == rows
    for first, end, width in tiles:
        assert width == (min(keys, end) if causal else keys)
        padded = (width + 3) // 4 * 4
        assert end - first == 1 or (end - first) * padded <= budget
    if causal and budget == 1000 and rows == keys == 100:
        assert tiles[0][1] > tiles[1][1] - tiles[1][0]  # early tiles have more rows


class LargestResult(TorchDispatchMode):
    """Remembers the most bytes that any result had."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return out


def test_twin_stays_within_its_budget():
    inputs = draw(60, 60, 8, 16)
    with LargestResult() as largest:
        reference.indexer_topk(*inputs, 4, budget_bytes=20000)
    assert largest.bytes <= max(20000, inputs[0].numel() * 4)


@BOTH
def test_bad_topk_is_named_in_one_line(function):
    for topk in (0, -1, 2.0, None):
        with pytest.raises(ValueError, match="topk must be a positive integer, got"):
            function(*draw(2, 2), topk)
    with pytest.raises(ValueError, match="budget_bytes must be a positive integer, got -1"):
        function(*draw(2, 2), 1, budget_bytes=-1)


def test_operator_is_registered_with_a_fake():
    torch.library.opcheck(
        torch.ops.mla_attention.indexer_topk.default,
        (*draw(3, 3), 2, True, None, None, 2**20),
        test_utils=("test_schema", "test_faketensor"),
    )
