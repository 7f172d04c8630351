"""The Gluon score kernel on a Hopper: the portable kernel's scores to the bit, and nothing written beside them."""

import math

import pytest
import torch

from mla_attention.fusions import reference
from mla_attention.fusions.dsa import indexer_scores as score_kernels
from mla_attention.fusions.dsa.indexer_scores import choose_score_blocks, launch_scores, takes_hopper_scores
from mla_attention.fusions.dsa.key_ranges import key_ranges
from tests.gpu.test_dsa_selection import draw, same_numbers  # noqa: F401 (a fixture)
from tests.guards import guarded

INF = float("inf")


def on_hopper():
    if not torch.cuda.is_available():
        return False
    q = torch.empty(1, 1, 128, device="cuda", dtype=torch.bfloat16)
    return takes_hopper_scores(q, q[0])


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU and Triton 3.6")]


def hopper(q, k, weights, *, relu=True, poison=math.nan, blocks=None, **ranges):
    """Scores of the Gluon kernel, guarded on every side."""
    from mla_attention.fusions.dsa.indexer_scores_hopper import launch_scores_hopper

    rows, keys = q.shape[0], k.shape[0]
    stride = (keys + 7) // 4 * 4
    out, guard = guarded(torch.full((rows, keys), poison, device="cuda"), stride=(stride, 1), offset=4)
    launch_scores_hopper(q, k, weights, out, relu=relu, blocks=blocks, **ranges)
    guard.check()
    return out


def portable(q, k, weights, *, relu=True, poison=math.nan, **ranges):
    out = torch.full((q.shape[0], k.shape[0]), poison, device="cuda")
    blocks = choose_score_blocks(q.dtype, q.shape[1], q.shape[2])
    launch_scores(q, k, weights, out, relu=relu, blocks=blocks, **ranges)
    return out


def same(actual, expected):
    """Equal in every value, NaN where it is NaN."""
    filled = [scores.nan_to_num(7.0, posinf=INF, neginf=-INF) for scores in (actual, expected)]
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(*filled)


@pytest.mark.parametrize("heads", [1, 3, 4, 5, 32, 64])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 1000), (63, 65), (65, 63), (64, 256), (1000, 1), (1000, 1000)])
def test_every_size_equals_the_portable_kernel(rows, keys, heads):
    inputs = draw(rows, keys, heads)
    first_row = max(0, keys - rows)
    scores = hopper(*inputs, first_row=first_row)
    assert same(scores, portable(*inputs, first_row=first_row))
    positions = torch.arange(first_row, first_row + rows, device="cuda")
    begin, end = key_ranges(rows, keys, device=scores.device, q_positions=positions.clamp(max=keys - 1))
    assert same(hopper(*inputs, begin=begin, end=end), portable(*inputs, begin=begin, end=end))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("relu", [True, False])
def test_types_widths_and_relu(dtype, width, relu):
    inputs = draw(300, 777, 12, width, dtype)
    scores = hopper(*inputs, relu=relu, first_row=477)
    assert same(scores, portable(*inputs, relu=relu, first_row=477))
    exact = reference.indexer_scores(
        *(tensor.double() for tensor in inputs), relu=relu, q_positions=torch.arange(477, 777, device="cuda")
    )
    assert torch.equal(scores == -INF, exact == -INF)
    finite = exact > -INF
    assert (scores[finite] - exact[finite]).abs().max() < 5e-6 * exact[finite].abs().max()


def test_packed_sequences():
    lengths = torch.tensor([0, 1, 1, 63, 65, 0, 700, 170, 1000])
    inputs = draw(int(lengths.sum()), int(lengths.sum()), 32)
    offsets = lengths.cumsum(0).to("cuda")
    begin, end = key_ranges(len(inputs[0]), len(inputs[1]), device=offsets.device, cu_seqlens=offsets)
    assert same(hopper(*inputs, begin=begin, end=end), portable(*inputs, begin=begin, end=end))


def test_positions_in_any_order_and_rows_that_see_nothing():
    inputs = draw(500, 3000, 32)
    positions = torch.randint(-1000, 3000, (500,), device="cuda")
    positions[64:192] = -1  # whole tiles
    begin, end = key_ranges(500, 3000, device=positions.device, q_positions=positions)
    scores = hopper(*inputs, begin=begin, end=end)
    assert same(scores, portable(*inputs, begin=begin, end=end))
    assert (scores[64:192] == -INF).all()


def test_tiles_without_an_allowed_pair_are_left_alone_when_asked():
    inputs = draw(700, 2000, 32)
    scores = hopper(*inputs, first_row=100, fill=False, poison=7.0)
    allowed = torch.arange(2000, device="cuda") <= 100 + torch.arange(700, device="cuda")[:, None]
    expected = portable(*inputs, first_row=100)
    assert torch.equal(scores[allowed], expected[allowed])
    assert ((scores == 7.0) | (scores == -INF))[~allowed].all()
    assert (scores[:64, 256:] == 7.0).all()


def test_nan_and_infinity_go_where_the_portable_kernel_has_them():
    q, k, weights = draw(200, 600, 32)
    q[3, 5, 7], q[70, 0, 0], q[199, 31, 127] = math.nan, math.inf, math.nan
    k[100, 3], k[599, 0] = math.nan, -math.inf
    weights[150, 31] = math.nan
    scores = hopper(q, k, weights, first_row=400)
    assert same(scores, portable(q, k, weights, first_row=400))
    assert scores[3, :400].isnan().all()


def test_a_score_does_not_depend_on_rows_and_keys_beside_it():
    q, k, weights = draw(1000, 5000, 32)
    whole = hopper(q, k, weights, first_row=4000)
    assert torch.equal(hopper(q[100:329], k[:4400], weights[100:329], first_row=4100), whole[100:329, :4400])
    assert torch.equal(hopper(q[999:], k[1000:1001], weights[999:], first_row=9), whole[999:, 1000:1001])


def test_strided_inputs_go_to_the_portable_kernel():
    q, k, _ = draw(300, 500, 6)
    apart = guarded(q, stride=(6 * 136 + 40, 136, 1), offset=8)[0]
    keys = guarded(k, stride=(136, 1), offset=8)[0]
    assert takes_hopper_scores(q, k)
    assert not takes_hopper_scores(apart, k)
    assert not takes_hopper_scores(q, keys)


@pytest.mark.parametrize(("stages", "unroll", "group"), [(2, 2, 1), (4, 2, 3), (4, 8, 7), (6, 4, 100)])
def test_choices_change_nothing(stages, unroll, group):
    from mla_attention.fusions.dsa.indexer_scores_hopper import HopperScoreBlocks

    inputs = draw(900, 4000, 13)
    blocks = HopperScoreBlocks(stages, unroll, group)
    assert same(hopper(*inputs, first_row=3000, blocks=blocks), hopper(*inputs, first_row=3000))


@pytest.mark.parametrize("heads", [32, 64])
def test_a_large_chunk_many_times(heads):
    inputs = draw(2048, 32768, heads)
    expected = portable(*inputs, first_row=30720)
    for _ in range(10):
        assert torch.equal(hopper(*inputs, first_row=30720), expected)


def test_the_chooser_takes_it_when_preferred(monkeypatch):
    from mla_attention.fusions.dsa import indexer_scores_hopper as kernels

    inputs = draw(128, 512, 4)
    calls = []
    launch = kernels.launch_scores_hopper
    monkeypatch.setattr(kernels, "launch_scores_hopper", lambda *a, **options: calls.append(1) or launch(*a, **options))
    monkeypatch.setattr(score_kernels, "PREFER_HOPPER_SCORES", True)
    positions = torch.arange(384, 512, device="cuda")
    scores = score_kernels.indexer_scores(*inputs, q_positions=positions)
    assert calls == [1]
    monkeypatch.setattr(score_kernels, "PREFER_HOPPER_SCORES", False)
    assert same(scores, score_kernels.indexer_scores(*inputs, q_positions=positions))
    assert calls == [1]
