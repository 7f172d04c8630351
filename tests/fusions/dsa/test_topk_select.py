"""topk_select: the twin and every kernel against a sort in Python (the kernels run compiled on a GPU)."""

import math
import os

import pytest
import torch

from mla_attention.fusions import reference, topk_select
from mla_attention.fusions.dsa import topk_select as kernels
from mla_attention.fusions.dsa.topk_pieces import CAUSAL, RANGES
from mla_attention.fusions.dsa.topk_select import TopkBlocks, choose_sample, choose_topk_blocks, launch_topk
from tests.aot.harness import in_fresh_process
from tests.fusions.dsa import selection_oracles as oracles
from tests.guards import guarded, guarded_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUFFERED = TopkBlocks(256, 4, sample=0, group=4, mark_block=512, programs_per_sm=4, max_registers=None)
SAMPLED = TopkBlocks(256, 4, sample=128, group=4, mark_block=512, programs_per_sm=4, max_registers=None)
PATHS = {"buffered": {"blocks": BUFFERED}, "sampled": {"blocks": SAMPLED}, "bisected": {"bisect": True}}


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def launch(scores, topk, **options):
    out, guard = guarded(torch.full((scores.shape[0], topk), -7, device=DEVICE))
    with guarded_allocations():
        launch_topk(scores, out, topk=topk, **options)
    guard.check()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keys", [1, 2, 5, 64, 301])
@pytest.mark.parametrize("topk", [1, 2, 8, 200, 400])
def test_twin_selects_as_a_sort_does(dtype, keys, topk):
    scores = oracles.awkward_rows(keys).to(dtype)
    assert torch.equal(reference.topk_select(scores, topk), oracles.select(scores, topk))


@pytest.mark.parametrize("keys", [1, 2, 17, 2047, 2048, 2049])
@pytest.mark.parametrize("topk", [1, 8, 2048])
def test_any_number_of_keys_against_any_topk(keys, topk):
    scores = torch.randn(keys, keys).tril().masked_fill(torch.ones(keys, keys).triu(1).bool(), -math.inf)
    selected = reference.topk_select(scores, topk)
    assert selected.shape == (keys, min(topk, keys))
    assert torch.equal((selected >= 0).sum(-1), torch.arange(1, keys + 1).clamp(max=topk))
    last = scores[-1].topk(min(topk, keys)).indices.sort().values
    assert torch.equal(selected[-1], last)


def test_fp64_scores_are_not_rounded():
    scores = torch.tensor([[1.0, 1.0 + 1e-12, 1.0 - 1e-12]], dtype=torch.float64)
    assert reference.topk_select(scores, 1).tolist() == [[1]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("keys", "topk"), [(1, 1), (5, 2), (64, 8), (301, 1), (301, 100), (700, 128)])
def test_kernels_select_as_a_sort_does(path, keys, topk):
    scores = oracles.awkward_rows(keys, DEVICE)
    assert torch.equal(launch(scores, topk, **PATHS[path]), oracles.select(scores, topk))


@pytest.fixture
def left(monkeypatch):
    """Without the buffered kernel: collects the marks of the rows that the sampled kernel leaves to it."""
    marks = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *arguments, **options: marks.append(arguments[4])

    monkeypatch.setattr(kernels, "_topk_buffered_kernel", Recorder())
    return marks


@pytest.mark.parametrize("topk", [1, 40, 90])
def test_sampled_kernel_does_plain_rows_alone_and_leaves_the_rest(topk, left):
    plain = torch.randn(3, 1024).to(DEVICE)
    plain[1, ::5] = math.nan  # numbers are still more than enough
    out = launch(torch.cat([plain, oracles.awkward_rows(1024, DEVICE)[[2, 4, 7, 11]]]), topk, blocks=SAMPLED)
    assert left[0].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert torch.equal(out[:3], oracles.select(plain, topk))


def test_sampled_kernel_does_rows_whose_largest_scores_are_zeros(left):
    scores = -torch.rand(2, 1024).to(DEVICE)
    scores[:, torch.randperm(1024)[:220]] = 0.0  # the bound lies just below zero, where -0.0 would be
    scores[1] = -scores[1].neg()
    out = launch(scores, 100, blocks=SAMPLED)
    assert left[0].tolist() == [0, 0]
    assert torch.equal(out, oracles.select(scores, 100))


def sampled_keys(topk, keys):
    """The keys that SAMPLED looks at first, of rows that begin at wide loads."""
    sample, group = choose_sample(SAMPLED, topk, keys)
    i_group, width = torch.arange(sample // group), keys // (sample // group)
    start = i_group * width + ((i_group * 7919 % 256) * (width - group + 1) >> 8)
    return ((start // 4 * 4)[:, None] + torch.arange(group)).flatten()


def test_sampled_kernel_leaves_rows_whose_sample_misleads(left):
    scores = torch.rand(3, 1024)
    sampled = sampled_keys(100, 1024)
    scores[0, sampled] = 1.0 + torch.rand(sampled.shape)  # fewer than topk exceed the bound
    scores[1] = 1.0 + scores[1]
    scores[1, sampled] = torch.rand(sampled.shape)  # more than there are slots
    launch(scores.to(DEVICE), 100, blocks=SAMPLED)
    assert left[0].tolist() == [1, 1, 0]


def test_sampled_kernel_never_takes_a_nan_for_a_number():
    scores = torch.rand(1024)
    scores[torch.randperm(1024)[:200]] = math.nan
    sampled = sampled_keys(100, 1024)
    scores[sampled] = 1.0 + torch.rand(sampled.shape)  # misleads: fewer than topk exceed the bound
    scores = scores[None].to(DEVICE)
    assert torch.equal(launch(scores, 100, blocks=SAMPLED), oracles.select(scores, 100))


@pytest.mark.parametrize(("keys", "rows"), [(32768, 4), (34950, 2), (131072, 2)])
def test_sampled_kernel_leaves_no_row_of_the_presets(keys, rows, left):
    scores = torch.randn(rows, keys).to(DEVICE)
    scores[0] = scores[0].relu() - 3.0 * torch.rand(keys, device=DEVICE) ** 20  # masses of one value below the top
    out = launch(scores, 2048, blocks=choose_topk_blocks(2048))
    assert left[0].tolist() == [0] * rows
    assert torch.equal(out, reference.topk_select(scores, 2048))


def chance_of_at_least(hits: int, *, marked: int, drawn: int, keys: int) -> float:
    """Of `keys` keys, `marked` are marked and `drawn` are drawn: the chance that `hits` or more of these are marked."""
    k = torch.arange(hits, min(drawn, marked) + 1, dtype=torch.float64)

    def log_choose(n, m):
        return torch.lgamma(n + 1.0) - torch.lgamma(m + 1.0) - torch.lgamma(n - m + 1.0)

    n, m, all_keys = (torch.tensor(float(x), dtype=torch.float64) for x in (drawn, marked, keys))
    return float((log_choose(m, k) + log_choose(all_keys - m, n - k) - log_choose(all_keys, n)).exp().sum())


@pytest.mark.parametrize("keys", [16384, 32768, 34952, 34953, 65536, 131072])
def test_one_row_in_a_hundred_thousand_is_left(keys):
    blocks = choose_topk_blocks(2048)
    sample, _ = choose_sample(blocks, 2048, keys)
    rank = int(0.985 * ((sample / keys * 2048) ** 0.5 + (sample / keys * blocks.capacity) ** 0.5) ** 2 / 4)
    few = chance_of_at_least(rank, marked=2048, drawn=sample, keys=keys)
    fits = chance_of_at_least(rank + rank // 32 + 1, marked=blocks.capacity, drawn=sample, keys=keys)
    assert few + (1.0 - fits) < 1e-5


@pytest.mark.parametrize("marks", [[0] * 11, [1] * 11, [0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]])
def test_buffered_kernel_takes_the_marked_rows_alone(marks):
    scores = torch.randn(11, 300, device=DEVICE)
    out = torch.full((11, 9), -7, device=DEVICE)
    todo = torch.tensor(marks, dtype=torch.int32, device=DEVICE)
    buffer = torch.empty(2, 256, dtype=torch.int64, device=DEVICE)
    kernels._topk_buffered_kernel[(2,)](
        *(scores, None, None, out, todo, buffer, 11, 300, 300, 0, 9, 9, 256), RANGE=0, BLOCK=128, CAPACITY=256, TURNS=4
    )
    expected = torch.where(todo[:, None] != 0, oracles.select(scores, 9), -7)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keys", [640, 643])
def test_entries_outside_a_rows_range_take_no_part(path, keys):
    scores = torch.randn(6, keys, device=DEVICE)
    begin = torch.tensor([0, 3, 50, 0, 5, 600], dtype=torch.int32, device=DEVICE)
    end = torch.tensor([0, keys, 600, keys, 55, keys], dtype=torch.int32, device=DEVICE)
    key = torch.arange(keys, device=DEVICE)
    allowed = (key >= begin[:, None]) & (key < end[:, None])
    expected = oracles.select(scores.masked_fill(~allowed, -math.inf), 60)
    for filling in (math.inf, math.nan):
        poisoned = scores.masked_fill(~allowed, filling)
        out = launch(poisoned, 60, key_range=RANGES, begin=begin, end=end, **PATHS[path])
        assert torch.equal(out, expected)


@pytest.mark.parametrize("path", PATHS)
def test_causal_rows_stop_at_their_own_key(path):
    scores = torch.randn(5, 900, device=DEVICE)
    for first in (0, 893):
        key = torch.arange(900, device=DEVICE)
        later = key > first + torch.arange(5, device=DEVICE)[:, None]
        out = launch(scores.masked_fill(later, math.nan), 90, key_range=CAUSAL, first_row=first, **PATHS[path])
        assert torch.equal(out, oracles.select(scores.masked_fill(later, -math.inf), 90))


@pytest.mark.parametrize("stride", [644, 645])
def test_row_strides_and_starts_that_forbid_wide_loads(stride):
    values = torch.randn(3, 641, device=DEVICE)
    for offset in (0, 1, 2):
        scores, _ = guarded(values, stride=(stride, 1), offset=offset)
        assert torch.equal(launch(scores, 64, blocks=SAMPLED), oracles.select(values, 64))


def test_public_function_equals_its_twin():
    for shape, topk in (((3, 40), 7), ((2, 6), 50), ((1, 1), 1)):
        scores = torch.randn(shape, device=DEVICE).round(decimals=1)
        assert torch.equal(topk_select(scores, topk), reference.topk_select(scores, topk))
    wide = torch.randn(30, 4, device=DEVICE).t()
    assert torch.equal(topk_select(wide, 9), reference.topk_select(wide, 9))
    sparse = torch.randn(4, 60, device=DEVICE)[:, ::2]
    assert torch.equal(topk_select(sparse, 9), reference.topk_select(sparse, 9))


@pytest.mark.parametrize("function", [topk_select, reference.topk_select])
def test_nothing_in_nothing_out(function):
    assert function(torch.empty(0, 5, device=DEVICE), 3).shape == (0, 3)
    assert function(torch.empty(4, 0, device=DEVICE), 3).shape == (4, 0)


def test_a_hundred_runs_select_one_set():
    scores = torch.randn(4, 500, device=DEVICE).round(decimals=1)
    first = reference.topk_select(scores, 64)
    assert all(torch.equal(reference.topk_select(scores, 64), first) for _ in range(100))
    runs = 100 if DEVICE == "cuda" else 3
    assert all(torch.equal(launch(scores, 64, blocks=SAMPLED), first) for _ in range(runs))


@pytest.mark.parametrize("topk", [1, 8, 511, 512, 2047, 2048, 2049, 8192, 8193])
def test_rule_leaves_room_in_the_buffer(topk):
    blocks = choose_topk_blocks(topk)
    assert choose_topk_blocks(topk, 10**6) == blocks
    assert choose_topk_blocks(topk, 5) == (blocks or choose_topk_blocks(5))
    if topk > 8192:
        assert blocks is None
        return
    assert blocks.capacity >= 2 * topk
    assert blocks.mark_block % 32 == 0
    assert choose_sample(blocks, topk, 10**6) == (4 * blocks.sample, 2 * blocks.group)
    if topk == 2048:
        assert choose_sample(blocks, topk, 32768) == (2048, 4)


@pytest.mark.parametrize("function", [topk_select, reference.topk_select])
@pytest.mark.parametrize(
    ("scores", "topk", "message"),
    [
        (torch.zeros(3), 1, "scores must have 2 dimensions"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), 1, r"scores must be one of .*float32.*bfloat16"),
        (torch.zeros(2, 3), 0, "topk must be a positive integer, got 0"),
        (torch.zeros(2, 3), 1.5, "topk must be a positive integer, got 1.5"),
        (torch.zeros(2, 3), True, "topk must be a positive integer, got True"),
    ],
)
def test_bad_input_is_named_in_one_line(function, scores, topk, message):
    with pytest.raises(ValueError, match=message) as caught:
        function(scores.to(DEVICE), topk)
    assert "\n" not in str(caught.value)


def test_kernel_refuses_fp64():
    with pytest.raises(ValueError, match=r"scores must be one of torch\.float32, got torch\.float64"):
        topk_select(torch.zeros(2, 3, dtype=torch.float64, device=DEVICE), 1)


def test_operator_is_registered_with_a_fake():
    arguments = (torch.randn(3, 20, device=DEVICE), 4)
    torch.library.opcheck(
        torch.ops.mla_attention.topk_select.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def error_on_the_cpu() -> str:
    try:
        topk_select(torch.zeros(2, 3), 1)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the CPU")
def test_cpu_without_the_interpreter_names_the_twin():
    message = in_fresh_process("tests.fusions.dsa.test_topk_select:error_on_the_cpu")
    assert message.endswith("use mla_attention.fusions.reference.topk_select")
