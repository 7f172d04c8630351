"""indexer_kl's kernels against its fp64 twin, under Triton's interpreter (the same tests run compiled on a GPU)."""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_attention.fusions.dsa.attention_reference import indexer_kl as reference
from mla_attention.fusions.dsa.indexer_kl import _row_tiles, indexer_kl
from mla_attention.fusions.dsa.sparse_mla import sparse_mla
from tests.guards import guarded_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.2
GRADIENT_ROUNDING = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def draw(rows, keys, *, heads=3, width=24, index_heads=4, dim=16, dtype=torch.float32):
    """(index_q, index_k, index_weights), (query, key)"""
    indexer = (
        (torch.randn(rows, index_heads, dim) * 0.5).to(DEVICE, dtype),
        torch.randn(keys, dim).to(DEVICE, dtype),
        (torch.randn(rows, index_heads) * 0.3).to(DEVICE),
    )
    return indexer, (torch.randn(rows, heads, width).to(DEVICE, dtype), torch.randn(keys, width).to(DEVICE, dtype))


def choose(rows, keys, slots, *, unused=0.3):
    indices = torch.stack([torch.randperm(keys)[:slots] for _ in range(rows)])
    indices[torch.rand(rows, slots) < unused] = -1
    indices[rows // 2] = -1
    return indices.to(DEVICE)


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def run(function, indexer, attention, grad_kl, **options):
    leaves = [t.detach().clone().requires_grad_() for t in indexer]
    kl = function(*leaves, *attention, SCALE, **options)
    return kl, torch.autograd.grad(kl, leaves, grad_kl.to(kl.dtype))


def check(indexer, attention, **options):
    grad_kl = torch.rand(indexer[0].shape[0], device=DEVICE)
    kl, grads = run(indexer_kl, indexer, attention, grad_kl, **options)
    double = [t.double() for t in indexer], [t.double() for t in attention]
    expected, expected_grads = run(reference, *double, grad_kl, **options)
    assert kl.dtype == torch.float32
    assert error(kl, expected) < 1e-5
    assert torch.equal(kl == 0, expected == 0) or error(kl[expected == 0], 0 * expected[expected == 0]) < 1e-5
    for grad, want, leaf in zip(grads, expected_grads, indexer, strict=True):
        assert grad.dtype == leaf.dtype
        assert error(grad, want) < GRADIENT_ROUNDING[indexer[0].dtype]
    return kl, grads


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("heads", "width", "index_heads", "dim", "keys", "slots"),
    [(1, 16, 1, 16, 40, 20), (3, 18, 3, 12, 40, 33), (12, 24, 20, 8, 150, 130), (130, 40, 4, 16, 40, 24)],
)
def test_sparse_support_equals_the_twin(heads, width, index_heads, dim, keys, slots, relu):
    inputs = draw(3, keys, heads=heads, width=width, index_heads=index_heads, dim=dim)
    with guarded_allocations():
        check(*inputs, topk_indices=choose(3, keys, slots), relu=relu)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_equals_the_twin(dtype):
    check(*draw(3, 90, heads=20, dtype=dtype), topk_indices=choose(3, 90, 70))
    check(*draw(17, 17, dtype=dtype))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("budget_bytes", [1, 2**30])
def test_ordered_sums_equal_the_twin(budget_bytes):
    check(*draw(3, 20), topk_indices=choose(3, 20, 15), budget_bytes=budget_bytes)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("budget_bytes", [8 * 20 * 12, 2**30])
def test_dense_support_equals_the_twin(relu, budget_bytes):
    inputs = draw(20, 20, width=40)
    with guarded_allocations():
        check(*inputs, relu=relu, budget_bytes=budget_bytes)


@pytest.mark.parametrize("offsets", [[0, 7, 7, 30], [0, 0, 1, 3, 35, 40]])
def test_packed_sequences_equal_the_twin(offsets):
    kl, grads = check(*draw(40, 40), cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=DEVICE))
    assert kl[offsets[-1] :].eq(0).all()
    assert grads[0][offsets[-1] :].eq(0).all()
    assert grads[2][offsets[-1] :].eq(0).all()


def test_positions_of_a_chunk_equal_the_twin():
    check(*draw(5, 70), q_positions=torch.tensor([3, 69, 0, 50, -1], device=DEVICE))
    offsets = torch.tensor([0, 33, 60], device=DEVICE)
    positions = torch.tensor([3, 69, 33, 50, 32], device=DEVICE)
    check(*draw(5, 70), q_positions=positions, cu_seqlens=offsets)
    check(*draw(5, 70), q_positions=positions, cu_seqlens=offsets, topk_indices=choose(5, 70, 50))


def test_sequences_are_isolated_bitwise():
    indexer, attention = draw(20, 20)
    offsets = torch.tensor([0, 9, 20], device=DEVICE)
    alone = indexer_kl(*indexer, *attention, SCALE, cu_seqlens=offsets)
    changed = [t.clone() for t in (*indexer, *attention)]
    for t in changed:
        t[9:] = torch.randn_like(t[9:])
    among = indexer_kl(*changed, SCALE, cu_seqlens=offsets)
    assert torch.equal(alone[:9], among[:9])


@pytest.mark.parametrize("sparse", [True, False])
def test_given_lse_and_tiles_change_nothing(sparse):
    indexer, attention = draw(7, 7)
    causal = torch.arange(7, device=DEVICE).expand(7, 7).tril() - torch.ones(7, 7, device=DEVICE).triu(1).long()
    options = {"topk_indices": causal.long()} if sparse else {}
    lse = sparse_mla(*attention, causal.long(), SCALE, 16)[1]
    grad_kl = torch.rand(7, device=DEVICE)
    whole, whole_grads = run(indexer_kl, indexer, attention, grad_kl, **options)
    for more in ({"lse": lse}, {"lse": lse, "budget_bytes": 8 * 7 * 4}):
        kl, grads = run(indexer_kl, indexer, attention, grad_kl, **options, **more)
        torch.testing.assert_close(kl, whole, rtol=1e-4, atol=1e-6)
        for grad, want in zip(grads, whole_grads, strict=True):
            assert error(grad, want.double()) < 1e-5


class LiveTiles(TorchDispatchMode):
    """Remembers the most bytes of fp32 [rows, S] results that were alive at once."""

    def __init__(self, keys):
        super().__init__()
        self.keys, self.alive, self.bytes = keys, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[1] == self.keys and t.dtype == torch.float32:
                self.alive.append(weakref.ref(t))
        tiles = [t for ref in self.alive if (t := ref()) is not None]
        self.bytes = max(self.bytes, sum(t.numel() * 4 for t in tiles))
        return out


def test_tiles_stay_within_the_budget():
    indexer, attention = draw(12, 12)
    budget = 8 * 12 * 4
    with LiveTiles(12) as live:
        run(indexer_kl, indexer, attention, torch.rand(12, device=DEVICE), budget_bytes=budget)
    assert 0 < live.bytes <= budget


def test_tiles_begin_where_their_rows_are_aligned():
    """A tile of begin, end or lse that starts at an odd row is another binary of every kernel that reads it."""
    for keys in (999, 1000, 4097):
        query, key = torch.empty(5000, 1, 1), torch.empty(keys, 1)
        tiles = list(_row_tiles(query, key, None, 8 * 333 * keys))
        assert [t.stop for t in tiles[:-1]] == [t.start for t in tiles[1:]]
        assert (tiles[0].start, tiles[-1].stop) == (0, 5000)
        assert all(t.start % 64 == 0 for t in tiles)


def test_rows_do_not_depend_on_the_microbatch():
    indexer, attention = draw(10, 10)
    indices = choose(10, 10, 6)
    whole = indexer_kl(*indexer, *attention, SCALE, topk_indices=indices)
    halves = [
        indexer_kl(
            indexer[0][rows], indexer[1], indexer[2][rows], attention[0][rows], attention[1], SCALE, topk_indices=part
        )
        for rows, part in ((slice(0, 5), indices[:5]), (slice(5, 10), indices[5:]))
    ]
    assert torch.equal(torch.cat(halves), whole)


def test_sparse_over_all_keys_equals_dense():
    indexer, attention = draw(9, 9)
    causal = torch.arange(64, device=DEVICE).expand(9, 64)
    causal = torch.where(causal <= torch.arange(9, device=DEVICE)[:, None], causal, -1)
    grad_kl = torch.rand(9, device=DEVICE)
    dense, dense_grads = run(indexer_kl, indexer, attention, grad_kl)
    sparse, sparse_grads = run(indexer_kl, indexer, attention, grad_kl, topk_indices=causal)
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-6)
    for grad, want in zip(sparse_grads, dense_grads, strict=True):
        assert error(grad, want.double()) < 1e-5


@pytest.mark.parametrize("sparse", [True, False])
def test_no_epsilon_hides_in_the_logarithms(sparse):
    index_q = torch.zeros(2, 1, 16, device=DEVICE)
    index_q[:, 0, 0] = -math.log(1e-12)
    index_k = torch.zeros(2, 16, device=DEVICE)
    index_k[0, 0] = -1.0  # scores [log 1e-12, 0]
    query, key = torch.zeros(2, 1, 16, device=DEVICE), torch.zeros(2, 16, device=DEVICE)
    query[1, 0, 0], key[0, 0], key[1, 0] = 3000.0, 1.0, -1.0  # row 1: everything on key 0
    weights = torch.ones(2, 1, device=DEVICE, requires_grad=True)
    indices = torch.tensor([[0, -1], [0, 1]], device=DEVICE) if sparse else None
    kl = indexer_kl(index_q, index_k, weights, query, key, 1.0, relu=False, topk_indices=indices)
    assert kl[0] == 0
    assert kl[1].item() == pytest.approx(27.631, abs=1e-3)
    kl[1].backward()
    assert weights.grad[1].item() == pytest.approx(-math.log(1e-12), rel=1e-6)  # sum of (predicted - target) * scores


@pytest.mark.parametrize("sparse", [True, False])
def test_gradient_is_predicted_minus_target(sparse):
    keys = 16
    scores = torch.randn(keys, device=DEVICE)
    # with unit keys index_q[t, 0] is the score row itself, so its gradient is d kl / d I
    index_q = scores.expand(keys, 1, keys).clone().requires_grad_()
    index_k, weights = torch.eye(keys, device=DEVICE), torch.ones(keys, 1, device=DEVICE)
    _, (query, key) = draw(keys, keys)
    indices = torch.arange(keys, device=DEVICE).expand(keys, keys) if sparse else None
    indexer_kl(index_q, index_k, weights, query, key, SCALE, relu=False, topk_indices=indices)[-1].backward()
    target = (torch.einsum("nd,sd->ns", query[-1].double(), key.double()) * SCALE).softmax(-1).mean(0)
    assert error(index_q.grad[-1, 0], scores.double().softmax(-1) - target) < 1e-5
    assert index_q.grad[:-1].eq(0).all()


@pytest.mark.parametrize("sparse", [True, False])
def test_attention_takes_no_gradient(sparse):
    indexer, attention = draw(8, 8)
    attention = [t.requires_grad_() for t in attention]
    indexer = [t.requires_grad_() for t in indexer]
    kl = indexer_kl(*indexer, *attention, SCALE, topk_indices=choose(8, 8, 5) if sparse else None)
    grads = torch.autograd.grad(kl.sum(), (*indexer, *attention), allow_unused=True)
    assert all(grad is not None for grad in grads[:3])
    assert grads[3:] == (None, None)


@pytest.mark.parametrize("sparse", [True, False])
def test_half_precision_holds_small_gradients(sparse):
    """A row's gradient of 1e-6 would vanish in half precision if it entered the products."""
    indexer, attention = draw(12, 12, dtype=torch.float16)
    options = {"topk_indices": choose(12, 12, 8, unused=0.0)} if sparse else {}
    grad_kl = torch.full((12,), 1e-6, device=DEVICE)
    _, grads = run(indexer_kl, indexer, attention, grad_kl, **options)
    double = [t.double() for t in indexer], [t.double() for t in attention]
    _, expected = run(reference, *double, grad_kl, **options)
    assert error(grads[2], expected[2]) < 1e-4
    for grad, want in zip(grads[:2], expected[:2], strict=True):
        spacing = 2.0**-24 + want.abs() * 2.0**-9  # of results that are subnormal, and of the rounded operands
        assert ((grad.double() - want).abs() <= spacing).all()
        assert grad.count_nonzero() > 0


def test_zero_tokens_and_empty_supports():
    indexer, attention = draw(0, 4)
    for indices in (None, torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)):
        leaves = [t.clone().requires_grad_() for t in indexer]
        kl = indexer_kl(*leaves, *attention, SCALE, topk_indices=indices)
        assert kl.shape == (0,)
        kl.sum().backward()
        assert leaves[1].grad.eq(0).all()
    indexer, attention = draw(2, 4)
    leaves = [t.clone().requires_grad_() for t in indexer]
    kl = indexer_kl(*leaves, *attention, SCALE, topk_indices=torch.full((2, 3), -1, device=DEVICE))
    kl.sum().backward()
    assert kl.eq(0).all()
    assert all(leaf.grad.eq(0).all() for leaf in leaves)


def test_operators_pass_opcheck():
    indexer, attention = draw(4, 12)
    ops = torch.ops.mla_attention
    tests = ("test_schema", "test_faketensor")
    slots, counts = ops.pack_slots(choose(4, 12, 8), None, None)
    begin, end = torch.zeros(4, dtype=torch.int32, device=DEVICE), torch.arange(1, 5, dtype=torch.int32, device=DEVICE)
    for support in ((slots, torch.zeros_like(counts), counts), (None, begin, end)):
        torch.library.opcheck(ops.attention_lse.default, (*attention, *support, SCALE), test_utils=tests)
        lse = ops.attention_lse(*attention, *support, SCALE)
        torch.library.opcheck(ops.attention_head_sums.default, (*attention, *support, lse, SCALE), test_utils=tests)
        target = ops.attention_head_sums(*attention, *support, lse, SCALE)
        torch.library.opcheck(
            ops.indexer_kl_rows.default, (*indexer, target, *support, True, True), test_utils=("test_faketensor",)
        )
        gradient = torch.zeros_like(target)
        torch.library.opcheck(
            ops.indexer_kl_gradient.default,
            (*indexer, gradient, torch.ones(4, device=DEVICE), *support, True, True, 2**20),
            test_utils=tests,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_q": torch.zeros(2, 4, 16, dtype=torch.bfloat16)}, "index_k must have index_q's dtype"),
        ({"index_q": torch.zeros(3, 4, 16)}, r"index_q must be \[T=2, Hi, Di\]"),
        ({"index_k": torch.zeros(4, 16)}, r"index_k must be \[S=5, Di=16\]"),
        ({"index_weights": torch.zeros(2, 3)}, r"index_weights must be \(2, 4\)"),
        ({"lse": torch.zeros(2, 2)}, r"lse must be floating \[T=2, n=3\]"),
        ({"cu_seqlens": torch.zeros(2)}, "cu_seqlens must be int32 or int64"),
        ({"q_positions": torch.zeros(3, dtype=torch.int64)}, r"q_positions must be int32 or int64 \[T=2\]"),
        ({"budget_bytes": 0}, "budget_bytes must be a positive integer"),
        ({"topk_indices": torch.zeros(2, 4)}, "topk_indices must be one of int32, int64"),
    ],
)
@pytest.mark.parametrize("function", [indexer_kl, reference])
def test_bad_input_is_refused_in_one_line(function, change, message):
    arguments = {
        "index_q": torch.zeros(2, 4, 16),
        "index_k": torch.zeros(5, 16),
        "index_weights": torch.zeros(2, 4),
        "query": torch.zeros(2, 3, 24),
        "key": torch.zeros(5, 24),
        "softmax_scale": 0.5,
    } | change
    arguments = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    with pytest.raises(ValueError, match=message) as caught:
        function(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [indexer_kl, reference])
def test_values_are_checked_on_request(function, monkeypatch):
    monkeypatch.setenv("MLA_ATTENTION_VALIDATE", "1")
    indexer, attention = draw(4, 4)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0"):
        function(*indexer, *attention, SCALE, cu_seqlens=torch.tensor([0, 3, 2], device=DEVICE))
    with pytest.raises(ValueError, match="q_positions must be below the 4 keys"):
        function(*indexer, *attention, SCALE, q_positions=torch.tensor([0, 1, 2, 4], device=DEVICE))
    with pytest.raises(ValueError, match="topk_indices must be distinct"):
        function(*indexer, *attention, SCALE, topk_indices=torch.tensor([[0, 1, 1]] * 4, device=DEVICE))
