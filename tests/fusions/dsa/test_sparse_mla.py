"""sparse_mla's kernels against its fp64 twin, under Triton's interpreter (the same tests run compiled on a GPU)."""

import sys

import pytest
import torch

from mla_attention.fusions.dsa import sparse_mla_backward, sparse_tiles
from mla_attention.fusions.dsa.attention_reference import sparse_mla as reference
from mla_attention.fusions.dsa.sparse_mla import sparse_mla
from mla_attention.fusions.dsa.sparse_mla_backward import BackwardBlocks, launch_backward
from mla_attention.fusions.dsa.sparse_mla_forward import ForwardBlocks, launch_forward
from mla_attention.fusions.dsa.sparse_tiles import pack_slots
from tests.guards import guarded_allocations

sparse_mla_module = sys.modules[sparse_mla.__module__]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def draw(rows, keys, heads, rank, rope, dtype=torch.float32):
    query = torch.randn(rows, heads, rank + rope, device=DEVICE).to(dtype).requires_grad_()
    key = torch.randn(keys, rank + rope, device=DEVICE).to(dtype).requires_grad_()
    return query, key


def choose(rows, keys, slots, *, unused=0.3, dtype=torch.int64):
    """Distinct keys in random order, some slots unused, the middle row empty."""
    indices = torch.stack([torch.randperm(keys)[:slots] for _ in range(rows)])
    indices[torch.rand(rows, slots) < unused] = -1
    indices[rows // 2] = -1
    return indices.to(DEVICE, dtype)


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def both(query, key, indices, rank, scale=0.3, grad_lse=True):
    """(out, lse, dquery, dkey) of the kernels and of the fp64 twin for the same random incoming gradients."""
    results = []
    grads = torch.randn(*query.shape[:2], rank, device=DEVICE), torch.randn(query.shape[:2], device=DEVICE)
    some = (indices >= 0).any(-1)
    for function, dtype in ((sparse_mla, query.dtype), (reference, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (query, key)]
        out, lse = function(*leaves, indices, scale, rank)
        outputs, incoming = (out,), (grads[0].to(query.dtype).to(dtype),)
        if grad_lse:
            outputs, incoming = (out, lse[some]), (*incoming, grads[1][some].to(lse.dtype))
        results.append((out, lse, *torch.autograd.grad(outputs, leaves, incoming)))
    return results


def check(query, key, indices, rank, **options):
    (out, lse, *grads), (ref_out, ref_lse, *ref_grads) = both(query, key, indices, rank, **options)
    bound = ROUNDING[query.dtype]
    assert out.dtype == query.dtype
    assert lse.dtype == torch.float32
    assert error(out, ref_out) < bound
    assert torch.equal(lse.isinf(), ref_lse.isinf())
    torch.testing.assert_close(lse[lse.isfinite()].double(), ref_lse[ref_lse.isfinite()], rtol=1e-5, atol=1e-5)
    for grad, ref_grad in zip(grads, ref_grads, strict=True):
        assert grad.dtype == query.dtype
        assert error(grad, ref_grad) < bound
    empty = (indices < 0).all(-1)
    assert out[empty].eq(0).all()
    assert grads[0][empty].eq(0).all()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "keys", "slots"),
    [(1, 16, 16, 40, 20), (3, 12, 6, 40, 33), (12, 24, 8, 150, 130), (20, 32, 16, 40, 1), (96, 16, 8, 80, 64)],
)
def test_odd_sizes_equal_the_twin(heads, rank, rope, keys, slots):
    query, key = draw(3, keys, heads, rank, rope)
    with guarded_allocations():
        check(query, key, choose(3, keys, slots), rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_low_precision_equals_the_twin(dtype, index_dtype):
    query, key = draw(3, 90, 4, 32, 16, dtype)
    check(query, key, choose(3, 90, 70, dtype=index_dtype), 32)


def test_more_than_128_heads():
    query, key = draw(2, 40, 130, 16, 16, torch.bfloat16)
    check(query, key, choose(2, 40, 20), 16)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("heads", [3, 130])
def test_ordered_sums_equal_the_twin(heads, monkeypatch):
    monkeypatch.setattr(sparse_mla_backward, "SCRATCH_BYTES", 1)
    query, key = draw(3, 20, heads, 16, 6)
    check(query, key, choose(3, 20, 15), 16)


class Device:
    """What `takes_hopper_kernels` asks of a tensor, for one on a GPU that is not there."""

    device, dtype = torch.device("cuda"), torch.bfloat16

    def __init__(self, *shape, address=0):
        self.shape, self.address = shape, address

    def data_ptr(self):
        return self.address


@pytest.mark.parametrize(
    ("query", "key", "taken"),
    [
        (Device(5, 64, 576), Device(9, 576), True),
        (Device(5, 128, 576), Device(9, 576), True),
        (Device(5, 64, 576), Device(0, 576), False),  # it reads key 0 before it looks at the number of selected keys
        (Device(5, 16, 576), Device(9, 576), False),
        (Device(5, 64, 576, address=8), Device(9, 576), False),
        (Device(5, 64, 512), Device(9, 512), False),
    ],
)
def test_what_hopper_kernels_take(query, key, taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sparse_tiles.triton, "__version__", "3.6.0")
    assert sparse_tiles.takes_hopper_kernels(query, key, 512) == taken


@pytest.mark.parametrize("preferred", [False, True])
def test_the_hopper_backward_where_it_is_preferred(preferred, monkeypatch):
    taken = []

    def launch(query, key, *_, blocks, ordered):
        taken.append((blocks.variant, ordered))
        return torch.zeros_like(query), torch.zeros_like(key)

    monkeypatch.setattr(sparse_mla_module, "PREFER_HOPPER_BACKWARD", preferred)
    monkeypatch.setattr(sparse_mla_module, "takes_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(sparse_mla_module, "launch_backward", launch)
    query, key = draw(2, 9, 16, 16, 8)
    sparse_mla(query, key, choose(2, 9, 4), 0.1, 16)[0].sum().backward()
    assert [ordered for _, ordered in taken] == [False]
    assert (taken[0][0] == "hopper") == preferred


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("variant", ["joint", "separate", "one_pass"])
def test_every_cut_gives_the_same_gradients(variant, ordered):
    query, key = draw(3, 50, 20, 20, 8)
    indices = choose(3, 50, 41)
    slots, counts = pack_slots(indices)
    out, lse = launch_forward(query.detach(), key.detach(), slots, counts, 0.3, 20, blocks=ForwardBlocks(16, 16, 4, 1))
    expected_out, _ = reference(query.double(), key.double(), indices, 0.3, 20)
    assert error(out, expected_out) < 2e-6
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(expected_out, (query, key), grad_out.double())
    blocks = BackwardBlocks(variant, 16, 16, 4, 1, query_keys=32, share_keys=64, share_channels=16)
    arguments = (query.detach(), key.detach(), slots, counts, out, lse, grad_out, None, 0.3)
    if variant == "one_pass" and ordered:
        with pytest.raises(ValueError, match="one_pass"):
            launch_backward(*arguments, blocks=blocks, ordered=ordered)
        return
    for scratch_bytes in (1, 2**20):
        grads = launch_backward(*arguments, blocks=blocks, ordered=ordered, scratch_bytes=scratch_bytes)
        for grad, ref_grad in zip(grads, expected, strict=True):
            assert error(grad, ref_grad) < 2e-6


def test_pack_slots_moves_keys_to_the_front():
    indices = torch.tensor([[-1, 5, -1, 2, 9], [-1, -1, -1, -1, -1], [3, 1, 0, 8, 7]], device=DEVICE)
    with guarded_allocations():
        slots, counts = pack_slots(indices)
    assert counts.tolist() == [3, 0, 5]
    assert slots[0, :3].tolist() == [5, 2, 9]
    assert slots[0, 3:].unique().tolist() == [9]
    assert slots[1].unique().tolist() == [0]
    assert slots[2, :5].tolist() == [3, 1, 0, 8, 7]
    begin, end = torch.tensor([3, 0, 1], device=DEVICE), torch.tensor([9, 5, 8], device=DEVICE)
    slots, counts = pack_slots(indices, (begin, end))
    assert counts.tolist() == [1, 0, 3]
    assert slots[2, :3].tolist() == [3, 1, 7]


def test_pack_slots_over_several_blocks():
    indices = torch.where(torch.rand(2, 2500) < 0.5, torch.arange(2500), -1).to(DEVICE)
    slots, counts = pack_slots(indices)
    for row, count, packed in zip(indices, counts.tolist(), slots, strict=True):
        assert packed[:count].tolist() == row[row >= 0].tolist()


def test_every_row_selecting_key_zero_equals_dense_masked_attention():
    query, key = draw(8, 30, 4, 16, 8)
    indices = choose(8, 30, 12, unused=0.0)
    indices = torch.where(indices == 0, -1, indices)
    indices[:, 5] = 0
    allowed = torch.zeros(8, 31, dtype=torch.bool, device=DEVICE)
    allowed = allowed.scatter_(1, torch.where(indices < 0, 30, indices), True)[:, :30]
    scores = torch.einsum("tnd,sd->tns", query.double(), key.double()) * 0.3
    expected = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ key.double()[:, :16]
    grad_out = torch.randn_like(expected)
    out, _ = sparse_mla(query, key, indices, 0.3, 16)
    assert error(out, expected) < 2e-6
    got = torch.autograd.grad(out, (query, key), grad_out.float())
    for grad, want in zip(got, torch.autograd.grad(expected, (query, key), grad_out), strict=True):
        assert error(grad, want) < 2e-6


@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("topk", [1, 8, 64])
def test_top_k_beyond_the_keys_equals_causal_attention(tokens, topk):
    query, key = draw(tokens, tokens, 2, 16, 8)
    causal = torch.arange(topk, device=DEVICE).expand(tokens, topk)
    causal = torch.where(causal <= torch.arange(tokens, device=DEVICE)[:, None], causal, -1)
    out, lse = sparse_mla(query, key, causal, 0.3, 16)
    expected, expected_lse = reference(query.double(), key.double(), causal, 0.3, 16)
    assert error(out, expected) < 2e-6
    assert error(lse, expected_lse) < 2e-6
    if topk >= tokens:
        scores = torch.einsum("tnd,sd->nts", query.double(), key.double()) * 0.3
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).triu(1)
        dense = scores.masked_fill(later, -torch.inf).softmax(-1) @ key.double()[:, :16]
        assert error(out, dense.transpose(0, 1)) < 2e-6


def test_sequences_are_isolated_bitwise():
    """A row's result depends on its selected keys alone: NaN elsewhere, -1 slots included, never reaches it."""
    query, key = draw(4, 40, 3, 16, 8)
    indices = choose(4, 20, 15)
    alone = sparse_mla(query, key, indices, 0.3, 16)
    poisoned = key.detach().clone()
    poisoned[20:] = torch.nan
    unselected = torch.ones(40, dtype=torch.bool, device=DEVICE)
    unselected[indices[indices >= 0]] = False
    poisoned[unselected] = torch.nan
    leaf = poisoned.requires_grad_()
    among = sparse_mla(query, leaf, indices, 0.3, 16)
    assert torch.equal(alone[0], among[0])
    assert torch.equal(alone[1], among[1])
    grad_query, grad_key = torch.autograd.grad(among[0].sum(), (query, leaf))
    assert grad_query.isfinite().all()
    assert grad_key[unselected].eq(0).all()


def test_expanded_gradients_and_strided_inputs():
    query, key = draw(3, 20, 4, 16, 8)
    indices = choose(3, 20, 12)
    want = torch.autograd.grad(sparse_mla(query, key, indices, 0.3, 16)[0].sum(), (query, key))
    strided_query = query.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    strided_key = key.detach().t().contiguous().t().requires_grad_()
    strided_indices = indices.t().contiguous().t()
    out, lse = sparse_mla(strided_query, strided_key, strided_indices, 0.3, 16)
    assert lse.shape == (3, 4)
    got = torch.autograd.grad(out, (strided_query, strided_key), out.new_ones(()).expand_as(out))
    torch.testing.assert_close(got, want)


def test_only_lse_is_differentiated():
    query, key = draw(3, 20, 4, 16, 8)
    indices = choose(3, 20, 12, unused=0.0)
    full = [0, 2]
    got = torch.autograd.grad(sparse_mla(query, key, indices, 0.3, 16)[1][full].sum(), (query, key))
    want = torch.autograd.grad(reference(query.double(), key.double(), indices, 0.3, 16)[1][full].sum(), (query, key))
    for grad, ref_grad in zip(got, want, strict=True):
        assert error(grad, ref_grad.double()) < 2e-6


def test_zero_tokens_zero_slots_and_zero_keys():
    query, key = draw(0, 4, 2, 16, 8)
    out, lse = sparse_mla(query, key, torch.zeros(0, 3, dtype=torch.int64, device=DEVICE), 0.5, 16)
    assert out.shape == (0, 2, 16)
    assert lse.shape == (0, 2)
    out.sum().backward()
    assert key.grad.eq(0).all()
    query, key = draw(2, 4, 2, 16, 8)
    out, lse = sparse_mla(query, key, torch.zeros(2, 0, dtype=torch.int64, device=DEVICE), 0.5, 16)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    out, _ = sparse_mla(query, key[:0], torch.full((2, 3), -1, device=DEVICE), 0.5, 16)
    out.sum().backward()
    assert out.eq(0).all()
    assert query.grad.eq(0).all()


def test_operators_pass_opcheck():
    query, key = draw(2, 20, 2, 16, 8)
    indices = choose(2, 20, 12)
    ops = torch.ops.mla_attention
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.pack_slots.default, (indices, None, None), test_utils=tests)
    slots, counts = pack_slots(indices)
    arguments = (query.detach(), key.detach(), slots, counts)
    torch.library.opcheck(ops.sparse_mla_forward.default, (*arguments, 0.3, 16), test_utils=tests)
    out, lse = ops.sparse_mla_forward(*arguments, 0.3, 16)
    torch.library.opcheck(
        ops.sparse_mla_backward.default, (*arguments, out, lse, out, None, 0.3, True), test_utils=tests
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 24, dtype=torch.float64)}, "query must be one of float16"),
        ({"query": torch.zeros(2, 24)}, "query must have 3 dimensions"),
        ({"key": torch.zeros(5, 23)}, r"key must be \[S, 24\]"),
        ({"key": torch.zeros(5, 24, dtype=torch.bfloat16)}, "key must have query's dtype"),
        ({"topk_indices": torch.zeros(2, 4)}, "topk_indices must be one of int32, int64"),
        ({"topk_indices": torch.zeros(3, 4, dtype=torch.int32)}, r"topk_indices must be \[T=2, K\]"),
        ({"kv_rank": 24}, r"kv_rank must be an integer in \[1, 24\)"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be a finite"),
        ({"softmax_scale": -1.0}, "softmax_scale must be a finite"),
    ],
)
@pytest.mark.parametrize("function", [sparse_mla, reference])
def test_bad_input_is_refused_in_one_line(function, change, message):
    arguments = {
        "query": torch.zeros(2, 3, 24),
        "key": torch.zeros(5, 24),
        "topk_indices": torch.zeros(2, 4, dtype=torch.int32),
        "softmax_scale": 0.5,
        "kv_rank": 16,
    } | change
    arguments = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    if function is reference and arguments["query"].dtype == torch.float64:
        arguments["key"] = arguments["key"].double()
        assert function(**arguments)[0].dtype == torch.float64
        return
    with pytest.raises(ValueError, match=message) as caught:
        function(**arguments)
    assert "\n" not in str(caught.value)


def test_kernels_refuse_tiles_they_cannot_hold():
    with pytest.raises(ValueError, match="kv_rank must be at most 1024"):
        sparse_mla(
            torch.zeros(1, 1, 2080, device=DEVICE),
            torch.zeros(1, 2080, device=DEVICE),
            torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
            1.0,
            2048,
        )


@pytest.mark.parametrize("function", [sparse_mla, reference])
@pytest.mark.parametrize(
    ("indices", "message"),
    [([[0, 5]], r"must lie in \[-1, 5\)"), ([[-2, 1]], r"must lie in \[-1, 5\)"), ([[3, 3]], "must be distinct")],
)
def test_index_values_are_checked_on_request(function, indices, message, monkeypatch):
    arguments = torch.zeros(1, 2, 24, device=DEVICE), torch.zeros(5, 24, device=DEVICE)
    monkeypatch.setenv("MLA_ATTENTION_VALIDATE", "1")
    with pytest.raises(ValueError, match=message):
        function(*arguments, torch.tensor(indices, device=DEVICE), 0.5, 16)
    function(*arguments, torch.tensor([[-1, 3, -1]], device=DEVICE), 0.5, 16)
