"""indexer_scores: the twin and the kernel against loops in fp64 (the kernel runs compiled on a GPU)."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_attention.fusions import indexer_scores, reference
from mla_attention.fusions.dsa.indexer_scores import ScoreBlocks, kernel_queries, launch_scores
from mla_attention.fusions.dsa.key_ranges import key_ranges
from tests.fusions.dsa import selection_oracles as oracles
from tests.guards import guarded, guarded_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("function", [indexer_scores, reference.indexer_scores], ids=["kernel", "twin"])
TILE = ScoreBlocks(rows=16, keys=32, num_warps=4, num_stages=2, group=2)


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def draw(rows, keys, heads, width, dtype=torch.float32):
    q = torch.randn(rows, heads, width, device=DEVICE).to(dtype)
    k = torch.randn(keys, width, device=DEVICE).to(dtype)
    return q, k, torch.randn(rows, heads, device=DEVICE)


def worst(actual, expected):
    """Largest error where scores are finite, in units of the largest score; the -inf pattern must agree."""
    assert torch.equal(actual == -math.inf, expected == -math.inf)
    finite = expected != -math.inf
    if not finite.any():
        return 0.0
    actual, expected = actual[finite].double(), expected[finite]
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


SEQUENCES = torch.tensor([0, 1, 1, 3, 20], dtype=torch.int32)
CASES = {
    "causal": {},
    "no relu": {"relu": False},
    "packed": {"cu_seqlens": SEQUENCES},
    "positions": {"q_positions": torch.tensor([5, 0, 22, -1, 7, 7, 21, 1, 19, 3, *range(13)])},
    "packed positions": {"cu_seqlens": SEQUENCES, "q_positions": torch.arange(22, -1, -1)},
}


def on_device(case):
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in case.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_twin_equals_loops(case, dtype):
    inputs = draw(23, 23, 3, 20, dtype)
    scores = reference.indexer_scores(*inputs, **on_device(CASES[case]))
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert worst(scores, oracles.scores(*inputs, **CASES[case])) < (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_equals_loops(case, dtype):
    inputs = draw(23, 23, 3, 20, dtype)
    with guarded_allocations():
        scores = indexer_scores(*inputs, **on_device(CASES[case]))
    assert scores.dtype == torch.float32
    assert worst(scores, oracles.scores(*inputs, **CASES[case])) < 1e-6


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "width"),
    [(1, 1, 1, 16), (2, 70, 1, 8), (70, 2, 12, 48), (17, 33, 20, 96), (65, 64, 2, 128), (5, 9, 4, 200), (3, 3, 2, 300)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_sizes(rows, keys, heads, width, dtype):
    inputs = draw(rows, keys, heads, width, dtype)
    expected = reference.indexer_scores(*(tensor.double() for tensor in inputs))
    assert worst(indexer_scores(*inputs), expected) < 2e-6


def test_kernel_tiles_groups_and_ranges_cover_the_matrix():
    q, k, weights = draw(70, 150, 2, 16)
    positions = torch.randint(0, 150, (70,), device=DEVICE)
    begin, end = key_ranges(70, 150, device=q.device, q_positions=positions)
    begin = (end - 40).clamp(min=0).int()
    out, guard = guarded(torch.full((70, 150), math.nan, device=DEVICE), stride=(155, 1), offset=1)
    launch_scores(q, k, weights, out, relu=True, begin=begin, end=end, blocks=TILE)
    guard.check()
    key = torch.arange(150, device=DEVICE)
    outside = (key < begin[:, None]) | (key >= end[:, None])
    everywhere = torch.full((70,), 149, device=DEVICE)
    expected = reference.indexer_scores(q.double(), k.double(), weights.double(), q_positions=everywhere)
    assert worst(out, expected.masked_fill(outside, -math.inf)) < 2e-6


def test_tiles_without_an_allowed_pair_are_left_alone_when_asked():
    q, k, weights = draw(32, 96, 1, 16)
    out = torch.full((32, 96), 7.0, device=DEVICE)
    launch_scores(q, k, weights, out, relu=True, first_row=3, fill=False, blocks=TILE)
    assert (out[:16, 32:] == 7.0).all()
    assert (out[16:, 64:] == 7.0).all()
    assert (out[:16, 31:32] == -math.inf).all()


@BOTH
def test_later_tokens_leave_earlier_rows_bitwise_unchanged(function):
    q, k, weights = draw(40, 40, 3, 32)
    before = function(q, k, weights)
    for tensor in (q, k, weights):
        tensor[29:] = math.nan
    after = function(q, k, weights)
    assert torch.equal(after[:29], before[:29])
    assert after[29:, :29].isnan().all()


@BOTH
@pytest.mark.parametrize("lengths", [(1, 2, 63, 64, 65), (65, 1, 0, 5)])
def test_sequences_of_a_pack_do_not_see_each_other(function, lengths):
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    q, k, weights = draw(total, total, 2, 16)
    packed = function(q, k, weights, cu_seqlens=offsets)
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        others = [tensor.clone() for tensor in (q, k, weights)]
        for tensor in others:
            tensor[:first], tensor[last:] = math.nan, math.nan
        assert torch.equal(function(*others, cu_seqlens=offsets)[first:last], packed[first:last])
        alone = function(q[first:last], k[first:last], weights[first:last])
        assert torch.allclose(packed[first:last, first:last], alone, rtol=1e-5, atol=1e-5)
        assert (packed[first:last, :first] == -math.inf).all()
        assert (packed[first:last, last:] == -math.inf).all()


@BOTH
def test_rows_outside_every_sequence_see_nothing(function):
    q, k, weights = draw(6, 6, 2, 16)
    scores = function(q, k, weights, cu_seqlens=torch.tensor([0, 4], device=DEVICE))
    assert (scores[4:] == -math.inf).all()
    scores = function(q, k, weights, q_positions=torch.tensor([-1, 0, -5, 1, 2, 5], device=DEVICE))
    assert (scores[[0, 2]] == -math.inf).all()
    assert (scores[5] > -math.inf).all()


@BOTH
def test_rows_of_a_chunk_equal_the_rows_of_the_whole(function):
    q, k, weights = draw(48, 48, 3, 32)
    whole = function(q, k, weights)
    rows = torch.randperm(48, device=DEVICE)[:20]
    chunk = function(q[rows], k, weights[rows], q_positions=rows)
    assert torch.allclose(chunk, whole[rows], rtol=1e-6, atol=1e-6)


@BOTH
def test_a_rotation_of_both_sides_changes_nothing(function):
    q, k, weights = draw(12, 12, 2, 32)
    hadamard = torch.ones(1, 1, device=DEVICE)
    for _ in range(5):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    turned = function(q @ hadamard * 32**-0.5, k @ hadamard * 32**-0.5, weights)
    assert worst(turned, function(q, k, weights).double()) < 1e-5
    assert worst(function(q @ hadamard, k @ hadamard, weights), function(q, k, weights).double()) > 1


@BOTH
def test_any_strides_equal_contiguous(function):
    q, k, weights = draw(9, 9, 3, 16)
    expected = function(q, k, weights)
    q2 = guarded(q, stride=(100, 20, 1), offset=3)[0]
    k2, weights2 = guarded(k, stride=(17, 1), offset=1)[0], weights.t().contiguous().t()
    assert torch.allclose(function(q2, k2, weights2), expected, rtol=1e-6, atol=1e-6)
    backwards = q.flip(-1).contiguous(), k.flip(-1).contiguous()
    q3, k3 = (torch.stack([tensor, tensor], -1)[..., 0] for tensor in (q, k))
    assert torch.allclose(function(q3, k3, weights), expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(function(*backwards, weights), expected, atol=1e-5)


def test_heads_too_far_apart_for_32_bits_are_copied():
    q = torch.empty(32, 2**20, 128, dtype=torch.bfloat16, device="meta").transpose(0, 1)  # heads outermost
    assert kernel_queries(q).is_contiguous()
    near = torch.empty(32, 1000, 128, dtype=torch.bfloat16, device="meta").transpose(0, 1)
    assert kernel_queries(near) is near


@BOTH
def test_weights_of_half_precision_count_as_fp32(function):
    q, k, weights = draw(5, 5, 2, 16, torch.bfloat16)
    weights = weights.bfloat16()
    assert torch.equal(function(q, k, weights), function(q, k, weights.float()))


@BOTH
def test_nan_in_a_query_reaches_its_scores(function):
    q, k, weights = draw(4, 4, 2, 16)
    q[2, 0, 0] = math.nan
    assert function(q, k, weights)[2, :3].isnan().all()


@BOTH
def test_nothing_in_nothing_out(function):
    for rows, keys in ((0, 4), (4, 0), (0, 0)):
        q, k, weights = draw(rows, keys, 2, 16)
        assert function(q, k, weights).shape == (rows, keys)
        positions = torch.arange(rows, device=DEVICE)
        assert function(q, k, weights, q_positions=positions).shape == (rows, keys)


def test_twin_gradients():
    q, k, weights = (tensor.double().requires_grad_() for tensor in draw(5, 5, 2, 4))
    offsets = torch.tensor([0, 2, 5], device=DEVICE)

    def finite_scores(*inputs, budget_bytes):
        scores = reference.indexer_scores(*inputs, cu_seqlens=offsets, budget_bytes=budget_bytes)
        return scores[scores > -math.inf]

    for budget in (1, 2**30):
        assert torch.autograd.gradcheck(lambda *i, b=budget: finite_scores(*i, budget_bytes=b), (q, k, weights))


class LargestTensor(TorchDispatchMode):
    """Remembers the most bytes that any result had."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return out


def test_twin_stays_within_its_budget_and_equals_one_tile():
    inputs = tuple(tensor.requires_grad_() for tensor in draw(50, 50, 8, 16))
    whole = reference.indexer_scores(*inputs)
    budget = 8 * 8 * 50 * 4
    with LargestTensor() as largest:
        tiled = reference.indexer_scores(*inputs, budget_bytes=budget)
        tiled_grads = torch.autograd.grad(tiled.masked_fill(tiled == -math.inf, 0.0).square().sum(), inputs)
    assert largest.bytes <= max(budget, inputs[0].numel() * 4)
    with LargestTensor() as largest:
        reference.indexer_scores(*inputs)
    assert largest.bytes == 50 * 8 * 50 * 4
    assert torch.allclose(tiled, whole, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(whole.masked_fill(whole == -math.inf, 0.0).square().sum(), inputs)
    for one, many in zip(grads, tiled_grads, strict=True):
        assert torch.allclose(one, many, rtol=1e-4, atol=1e-4)


def test_kernel_has_no_gradient_and_says_so():
    q, k, weights = draw(3, 3, 2, 16)
    scores = indexer_scores(q.requires_grad_(), k, weights)
    with pytest.raises(RuntimeError, match="train the indexer with indexer_kl"):
        scores[0, 0].backward()


Q, K, W = torch.zeros(4, 2, 16), torch.zeros(6, 16), torch.zeros(4, 2)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_q": Q[0]}, "index_q must have 3 dimensions"),
        ({"index_q": Q.int()}, "index_q must be one of .* got int32"),
        ({"index_q": Q[:, :0]}, "index_q must have at least one head"),
        ({"index_k": K[:, :8]}, r"index_k must be \[S, 16\] .* got \(6, 8\)"),
        ({"index_k": K.bfloat16()}, "index_k must have index_q's dtype"),
        ({"index_weights": W[:2]}, r"index_weights must be \[T, Hi\] = \(4, 2\), got \(2, 2\)"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens without q_positions needs as many keys as rows"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens must be int32 or int64"),
        ({"q_positions": torch.arange(3)}, r"q_positions must be int32 or int64 \[T=4\]"),
        ({"q_positions": torch.arange(4).float()}, "q_positions must be int32 or int64"),
        ({"budget_bytes": 0}, "budget_bytes must be a positive integer, got 0"),
    ],
)
def test_bad_input_is_named_in_one_line(function, change, message):
    arguments = {"index_q": Q, "index_k": K, "index_weights": W} | change
    arguments = on_device(arguments)
    with pytest.raises(ValueError, match=message) as caught:
        function(**arguments)
    assert "\n" not in str(caught.value)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([1, 6])}, r"cu_seqlens must rise from 0 to at most 6 keys, got \[1, 6\]"),
        ({"cu_seqlens": torch.tensor([0, 5, 3])}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "cu_seqlens must rise"),
        ({"q_positions": torch.tensor([0, 6, 1, 2])}, "q_positions must be below the 6 keys, got 6"),
    ],
)
def test_values_are_checked_when_asked(function, change, message, monkeypatch):
    arguments = on_device({"q_positions": torch.arange(4)} | change)
    inputs = (Q.to(DEVICE), K.to(DEVICE), W.to(DEVICE))
    function(*inputs, **arguments)
    monkeypatch.setenv("MLA_ATTENTION_VALIDATE", "1")
    with pytest.raises(ValueError, match=message):
        function(*inputs, **arguments)


def test_kernel_refuses_fp64_and_heads_wider_than_its_tile():
    with pytest.raises(ValueError, match="index_q must be one of float16, bfloat16, float32, got float64"):
        indexer_scores(*(tensor.double().to(DEVICE) for tensor in (Q, K, W)))
    with pytest.raises(ValueError, match="index_q's width must be at most 1024"):
        indexer_scores(*draw(2, 2, 1, 1025))


def test_operator_is_registered_with_a_fake():
    torch.library.opcheck(
        torch.ops.mla_attention.indexer_scores.default,
        (*draw(3, 3, 2, 16), True, None, torch.arange(3, device=DEVICE)),
        test_utils=("test_schema", "test_faketensor"),
    )
