"""The indexer's selection on a GPU: real sizes, forced choices, the set that the CPU selects from the same scores."""

from dataclasses import replace

import pytest
import torch

from mla_attention.fusions import indexer_scores, indexer_topk, reference, topk_select
from mla_attention.fusions.dsa import indexer_scores as score_kernels
from mla_attention.fusions.dsa import topk_sampled
from mla_attention.fusions.dsa import topk_select as topk_kernels
from mla_attention.fusions.dsa.indexer_scores import ScoreBlocks, launch_scores
from mla_attention.fusions.dsa.topk_pieces import CAUSAL
from mla_attention.fusions.dsa.topk_select import choose_topk_blocks, launch_topk

INF = float("inf")


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def draw(rows, keys, heads, width=128, dtype=torch.bfloat16):
    q = torch.randn(rows, heads, width, device="cuda").to(dtype)
    k = torch.randn(keys, width, device="cuda").to(dtype)
    return q, k, torch.randn(rows, heads, device="cuda") * (heads * width) ** -0.5


def awkward(scores):
    """Ties, zeros of both signs, NaN, infinities, order, in place."""
    scores[0].round_()
    scores[1].zero_()[::2].neg_()
    scores[2, ::7] = float("nan")
    scores[3, 100:] = -INF
    scores[4] = torch.arange(scores.shape[1], device="cuda")
    scores[5] = -torch.arange(scores.shape[1], device="cuda").float()
    scores[6] = float("nan")
    scores[7, ::2] = -INF
    scores[8, ::3] = INF
    scores[9].clamp_(max=0.0)  # half of the row ties at its top
    return scores


@pytest.mark.parametrize("topk", [1, 8, 100, 2047, 2048, 2049, 8192, 9000])
@pytest.mark.parametrize("keys", [2048, 8193, 32768, 131072])
def test_same_set_as_on_the_cpu(topk, keys):
    scores = awkward(torch.randn(24, keys, device="cuda"))
    assert torch.equal(topk_select(scores, topk).cpu(), reference.topk_select(scores.cpu(), topk))


@pytest.mark.parametrize(
    "change",
    [
        {"sample": 0},
        {"sample": 4096},
        {"group": 1},
        {"group": 8},
        {"mark_block": 1024},
        {"mark_block": 8192},
        {"num_warps": 8},
        {"max_registers": None},
        {"max_registers": 64},
        {"programs_per_sm": 1},
        {"capacity": 8192, "num_warps": 8},
    ],
    ids=str,
)
def test_choices_change_nothing(change):
    scores = awkward(torch.randn(300, 40001, device="cuda"))
    expected = reference.topk_select(scores, 2048)
    out = torch.full((300, 2048), -7, device="cuda")
    launch_topk(scores, out, topk=2048, blocks=replace(choose_topk_blocks(2048), **change))
    assert torch.equal(out, expected)


def test_bisected_kernel_on_long_rows():
    scores = awkward(torch.randn(40, 50000, device="cuda"))
    out = torch.full((40, 2048), -7, device="cuda")
    launch_topk(scores, out, topk=2048, bisect=True)
    assert torch.equal(out, reference.topk_select(scores, 2048))


def test_correlated_scores():
    scores = torch.randn(500, 32768, device="cuda").cumsum(-1)
    assert torch.equal(topk_select(scores, 2048), reference.topk_select(scores, 2048))
    recent = torch.randn(500, 32768, device="cuda") + torch.linspace(0, 4, 32768, device="cuda")
    assert torch.equal(topk_select(recent, 2048), reference.topk_select(recent, 2048))


def test_causal_rows_never_look_ahead():
    rows, keys = 400, 30000
    scores = torch.randn(rows, keys, device="cuda")
    for first in (0, 9000, keys - rows):
        later = torch.arange(keys, device="cuda") > first + torch.arange(rows, device="cuda")[:, None]
        out = torch.full((rows, 2048), -7, device="cuda")
        launch_topk(scores.masked_fill(later, INF), out, topk=2048, key_range=CAUSAL, first_row=first)
        assert torch.equal(out, reference.topk_select(scores.masked_fill(later, -INF), 2048))


def test_a_hundred_runs_select_one_set():
    scores = torch.randn(500, 32768, device="cuda").round(decimals=2)
    first = topk_select(scores, 2048)
    for _ in range(100):
        assert torch.equal(topk_select(scores, 2048), first)


def test_more_than_2_to_the_31_scores():
    rows, keys = 18000, 131072
    scores = torch.randn(1, keys, device="cuda").expand(rows, keys).contiguous()
    scores[-1].neg_()
    selected = topk_select(scores, 2048)
    assert torch.equal(selected[-1:], reference.topk_select(scores[-1:], 2048))
    assert (selected[:-1] == reference.topk_select(scores[:1], 2048)).all()
    del scores, selected
    q, k, weights = draw(rows, keys, 1, 16)
    last = indexer_scores(q, k, weights, q_positions=torch.arange(keys - rows, keys, device="cuda"))[-70:]
    expected = reference.indexer_scores(
        q[-70:], k, weights[-70:], q_positions=torch.arange(keys - 70, keys, device="cuda")
    )
    assert torch.allclose(last, expected, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_of_real_sizes(heads, dtype):
    q, k, weights = draw(1030, 4099, heads, 128, dtype)
    positions = torch.randint(0, 4099, (1030,), device="cuda")
    scores = indexer_scores(q, k, weights, q_positions=positions)
    expected = reference.indexer_scores(q.double(), k.double(), weights.double(), q_positions=positions)
    assert torch.equal(scores == -INF, expected == -INF)
    finite = expected > -INF
    error = (scores[finite].double() - expected[finite]).abs().max() / expected[finite].abs().max()
    assert error < 5e-6


@pytest.mark.parametrize("width", [20, 64, 96, 200, 256])
def test_scores_of_other_widths(width):
    q, k, weights = draw(130, 200, 5, width)
    scores, expected = indexer_scores(q, k, weights), reference.indexer_scores(q, k, weights)
    assert torch.allclose(scores, expected, atol=1e-4)


@pytest.mark.parametrize("tile", [(64, 64, 4, 2, 1), (64, 128, 4, 4, 7), (128, 128, 8, 3, 4), (32, 32, 4, 1, 100)])
def test_score_tiles_agree(tile):
    q, k, weights = draw(700, 1500, 8)
    out = torch.full((700, 1500), float("nan"), device="cuda")
    launch_scores(q, k, weights, out, relu=True, first_row=900, blocks=ScoreBlocks(*tile))
    expected = reference.indexer_scores(
        q, k, weights, q_positions=torch.arange(900, 1600, device="cuda").clamp(max=1499)
    )
    assert torch.equal(out == -INF, expected == -INF)
    assert torch.allclose(out, expected, atol=1e-4)


def test_selection_is_that_of_the_scores_whatever_the_tile():
    q, k, weights = draw(9000, 9000, 8)
    whole = indexer_topk(q, k, weights, 2048)
    for rows in (0, 3000, 9000):
        some = slice(rows, rows + 50)
        positions = torch.arange(9000, device="cuda")[some]
        scores = indexer_scores(q[some], k, weights[some], q_positions=positions)
        assert torch.equal(whole[some].cpu(), reference.topk_select(scores.cpu(), 2048))
        if len(positions):
            assert torch.equal(indexer_topk(q[some], k, weights[some], 2048, q_positions=positions), whole[some])
    for budget in (2**26, 2**24 + 4, 2**21):
        assert torch.equal(indexer_topk(q, k, weights, 2048, budget_bytes=budget), whole)


def test_later_tokens_and_other_sequences_change_nothing():
    q, k, weights = draw(6000, 6000, 4)
    offsets = torch.tensor([0, 1, 3, 2500, 5990], device="cuda")
    causal, packed = indexer_topk(q, k, weights, 512), indexer_topk(q, k, weights, 512, cu_seqlens=offsets)
    assert (packed[5990:] == -1).all()
    assert (packed[3:2500].masked_fill(packed[3:2500] < 0, 3) >= 3).all()
    for tensor in (q, k, weights):
        tensor[2500:] = float("nan")
    assert torch.equal(indexer_topk(q, k, weights, 512)[:2500], causal[:2500])
    assert torch.equal(indexer_topk(q, k, weights, 512, cu_seqlens=offsets)[:2500], packed[:2500])


def test_memory_stays_within_the_budget():
    q, k, weights = draw(65536, 65536, 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = indexer_topk(q, k, weights, 512, budget_bytes=2**28)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= out.numel() * 8 + 2**28 + 2**26  # the tile, and what the programs of top-k hold
    assert torch.equal((out >= 0).sum(-1), torch.arange(1, 65537, device="cuda").clamp(max=512))


def test_token_counts_share_binaries():
    kernels = (
        score_kernels._indexer_scores_kernel,
        topk_kernels._topk_buffered_kernel,
        topk_sampled.topk_sampled_kernel,
    )

    def binaries():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    for tokens in (1, 5000):
        indexer_topk(*draw(tokens, tokens, 4), 1024)
    count = binaries()
    for tokens in range(2, 6000, 199):
        indexer_topk(*draw(tokens, tokens, 4), 1024)
    assert binaries() == count
