"""The sparse attention kernels on a GPU, in bf16 at the published dims: against fp64, beside eager bf16."""

import importlib.metadata

import pytest
import torch

from mla_attention.fusions.dsa import attention_reference as twins
from mla_attention.fusions.dsa.indexer_kl import indexer_kl
from mla_attention.fusions.dsa.sparse_mla import sparse_mla
from mla_attention.fusions.dsa.sparse_mla_backward import BackwardBlocks, launch_backward
from mla_attention.fusions.dsa.sparse_tiles import pack_slots

pytestmark = pytest.mark.gpu

hopper = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or not importlib.metadata.version("triton").startswith("3.6."),
    reason="the Gluon kernels are for Hopper and Triton 3.6",
)
RANK, ROPE, DIM = 512, 64, 128
SCALE = (RANK + ROPE) ** -0.5
ULP = 2.0**-8  # of bf16, relative


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(rows, keys, heads, dtype=torch.bfloat16):
    query = torch.randn(rows, heads, RANK + ROPE, device="cuda").to(dtype)
    return query, torch.randn(keys, RANK + ROPE, device="cuda").to(dtype)


def choose(rows, keys, slots, unused=0.1):
    indices = torch.rand(rows, keys, device="cuda").topk(slots).indices
    indices[torch.rand(rows, slots, device="cuda") < unused] = -1
    indices[rows // 2] = -1
    return indices


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def eager(query, key, indices, scale, rank):
    """What eager PyTorch computes in the inputs' dtype: rounded scores, fp32 softmax, rounded probabilities."""
    gathered = key[indices.clamp_min(0)]
    scores = torch.einsum("tnd,tkd->tnk", query, gathered) * scale
    scores = scores.masked_fill((indices < 0)[:, None], -torch.inf)
    probabilities = scores.float().softmax(-1).nan_to_num().to(query.dtype)
    return torch.einsum("tnk,tkr->tnr", probabilities, gathered[..., :rank])


def gradients(function, query, key, grad_out, *arguments):
    leaves = [query.detach().clone().requires_grad_(), key.detach().clone().requires_grad_()]
    out = function(*leaves, *arguments)
    out = out[0] if isinstance(out, tuple) else out
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(64, torch.float16), *((n, torch.bfloat16) for n in (1, 3, 8, 12, 20, 64, 96, 128))],
)
def test_sparse_mla_is_as_exact_as_eager(heads, dtype):
    query, key = draw(40, 700, heads, dtype)
    indices = choose(40, 700, 300)
    grad_out = torch.randn(40, heads, RANK, device="cuda").to(dtype)
    arguments = indices, SCALE, RANK
    expected = gradients(twins.sparse_mla, query.double(), key.double(), grad_out, *arguments)
    fused = gradients(sparse_mla, query, key, grad_out, *arguments)
    plain = [t.nan_to_num() for t in gradients(eager, query, key, grad_out, *arguments)]
    for name, got, want, other in zip(("out", "dquery", "dkey"), fused, expected, plain, strict=True):
        assert got.isfinite().all(), name
        assert error(got, want) <= error(other, want) + ULP, name
    lse, expected_lse = (
        f(q, k, *arguments)[1]
        for f, q, k in ((sparse_mla, query, key), (twins.sparse_mla, query.double(), key.double()))
    )
    some = expected_lse.isfinite()
    torch.testing.assert_close(lse[some].double(), expected_lse[some], rtol=1e-4, atol=1e-4)
    assert lse[~some].eq(-torch.inf).all()


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [64, 128, 192])
def test_gluon_kernels_are_as_exact_as_eager(heads, dtype):
    from mla_attention.fusions.dsa.sparse_mla_hopper import launch_forward_hopper

    query, key = draw(70, 900, heads, dtype)
    indices = choose(70, 900, 333)
    indices[1, 1:] = -1
    indices[2, 64:] = -1
    slots, counts = pack_slots(indices)
    grad_out = torch.randn(70, heads, RANK, device="cuda").to(dtype)
    grad_lse = torch.randn(70, heads, device="cuda")
    grad_lse[(indices < 0).all(-1)] = 0
    leaves = [query.double().requires_grad_(), key.double().requires_grad_()]
    want, want_lse = twins.sparse_mla(*leaves, indices, SCALE, RANK)
    some = want_lse.isfinite()
    wanted = torch.autograd.grad((want, want_lse[some]), leaves, (grad_out.double(), grad_lse[some].double()))
    plain = [t.nan_to_num() for t in gradients(eager, query, key, grad_out, indices, SCALE, RANK)]
    for _ in range(20):
        out, lse = launch_forward_hopper(query, key, slots, counts, SCALE, RANK)
        assert error(out, want) <= error(plain[0], want) + ULP
        torch.testing.assert_close(lse[some].double(), want_lse[some], rtol=1e-4, atol=1e-4)
        assert lse[~some].eq(-torch.inf).all()
    blocks = BackwardBlocks("hopper", 64, 32, 8, 2)
    for ordered in (False, True) * 5:
        got = launch_backward(
            query, key, slots, counts, out, lse, grad_out, grad_lse, SCALE, blocks=blocks, ordered=ordered
        )
        for grad, expected in zip(got, wanted, strict=True):
            assert error(grad, expected) < 2 * ULP


def test_sparse_mla_in_full_precision():
    query, key = draw(5, 100, 20, torch.float32)
    indices = choose(5, 100, 60)
    grad_out = torch.randn(5, 20, RANK, device="cuda")
    expected = gradients(twins.sparse_mla, query.double(), key.double(), grad_out, indices, SCALE, RANK)
    for got, want in zip(gradients(sparse_mla, query, key, grad_out, indices, SCALE, RANK), expected, strict=True):
        assert error(got, want) < 2e-6


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize("variant", ["joint", "separate", "one_pass"])
def test_every_cut_of_the_backward_is_right(variant, keys, heads):
    query, key = draw(30, 500, heads)
    indices = choose(30, 500, 200)
    slots, counts = pack_slots(indices)
    out, lse = sparse_mla(query, key, indices, SCALE, RANK)
    grad_out = torch.randn_like(out)
    expected = gradients(twins.sparse_mla, query.double(), key.double(), grad_out, indices, SCALE, RANK)[1:]
    block_heads = min(64 if variant != "one_pass" else 32, max(16, heads))
    blocks = BackwardBlocks(variant, block_heads, keys, 8 if block_heads > 16 else 4, 1)
    for ordered in (False, True)[: 1 if variant == "one_pass" else 2]:
        got = launch_backward(
            query,
            key,
            slots,
            counts,
            out,
            lse,
            grad_out,
            None,
            SCALE,
            blocks=blocks,
            ordered=ordered,
            scratch_bytes=2**24,
        )
        for grad, want in zip(got, expected, strict=True):
            assert error(grad, want) < 2 * ULP


@pytest.mark.usefixtures("deterministic")
def test_ordered_sums_are_bitwise_the_same_every_time():
    query, key = draw(200, 256, 64)
    indices = choose(200, 256, 128)
    grad_out = torch.randn(200, 64, RANK, device="cuda").bfloat16()
    first = gradients(sparse_mla, query, key, grad_out, indices, SCALE, RANK)
    for _ in range(5):
        for got, want in zip(gradients(sparse_mla, query, key, grad_out, indices, SCALE, RANK), first, strict=True):
            assert torch.equal(got, want)


def test_every_row_selecting_key_zero_equals_dense_masked_attention():
    query, key = draw(300, 400, 64)
    indices = choose(300, 400, 64, unused=0.0)
    indices = torch.where(indices == 0, -1, indices)
    indices[:, 7] = 0
    allowed = torch.zeros(300, 401, dtype=torch.bool, device="cuda")
    allowed = allowed.scatter_(1, torch.where(indices < 0, 400, indices), True)[:, :400]

    def dense(query, key):
        scores = torch.einsum("tnd,sd->tns", query, key) * SCALE
        return scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ key[:, :RANK]

    grad_out = torch.randn(300, 64, RANK, device="cuda").bfloat16()
    expected = gradients(dense, query.double(), key.double(), grad_out)
    for got, want in zip(gradients(sparse_mla, query, key, grad_out, indices, SCALE, RANK), expected, strict=True):
        assert error(got, want) < 2 * ULP


def test_offsets_beyond_32_bits():
    rows, heads = 62_000, 64  # 2.3e9 elements of query
    query = torch.empty(rows, heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16).normal_()
    key = torch.randn(1000, RANK + ROPE, device="cuda").bfloat16().requires_grad_()
    indices = torch.randint(0, 20, (rows, 16), device="cuda") * 50 + torch.arange(16, device="cuda")
    out, lse = sparse_mla(query, key, indices, SCALE, RANK)
    last = slice(rows - 3, rows)
    want, want_lse = twins.sparse_mla(query[last].double(), key.double(), indices[last], SCALE, RANK)
    assert error(out[last], want) < ULP
    assert error(lse[last], want_lse) < 1e-4


def indexer_inputs(rows, keys, heads, index_heads):
    indexer = (
        (torch.randn(rows, index_heads, DIM, device="cuda") * 0.5).bfloat16(),
        torch.randn(keys, DIM, device="cuda").bfloat16(),
        torch.randn(rows, index_heads, device="cuda") * 0.02,
    )
    return indexer, draw(rows, keys, heads)


def kl_gradients(function, indexer, attention, grad_kl, **options):
    leaves = [t.detach().clone().requires_grad_() for t in indexer]
    kl = function(*leaves, *attention, SCALE, **options)
    return kl.detach(), *torch.autograd.grad(kl, leaves, grad_kl.to(kl.dtype))


@pytest.mark.parametrize("support", ["sparse", "dense", "packed", "chunk"])
@pytest.mark.parametrize(("heads", "index_heads"), [(64, 32), (128, 64), (20, 12)])
def test_indexer_kl_equals_the_twin(heads, index_heads, support):
    rows = 260
    keys = 260 if support != "chunk" else 900
    inputs = indexer_inputs(rows, keys, heads, index_heads)
    options = {
        "sparse": {"topk_indices": choose(rows, keys, 150)},
        "dense": {"budget_bytes": 8 * keys * 100},
        "packed": {"cu_seqlens": torch.tensor([0, 1, 64, 64, 129, 250], device="cuda", dtype=torch.int32)},
        "chunk": {"q_positions": torch.randperm(keys, device="cuda")[:rows]},
    }[support]
    grad_kl = torch.rand(rows, device="cuda")
    got = kl_gradients(indexer_kl, *inputs, grad_kl, **options)
    double = [[t.double() for t in part] for part in inputs]
    want = kl_gradients(twins.indexer_kl, *double, grad_kl, **options)
    assert error(got[0], want[0]) < 2e-4
    for name, grad, expected in zip(("dq", "dk", "dw"), got[1:], want[1:], strict=True):
        assert error(grad, expected) < (2 * ULP if name != "dw" else 1e-3), name


@pytest.mark.usefixtures("deterministic")
def test_indexer_kl_is_bitwise_the_same_every_time():
    indexer, attention = indexer_inputs(300, 300, 64, 32)
    grad_kl = torch.rand(300, device="cuda")
    for options in ({"topk_indices": choose(300, 300, 128)}, {}):
        first = kl_gradients(indexer_kl, indexer, attention, grad_kl, **options)
        for _ in range(3):
            for got, want in zip(kl_gradients(indexer_kl, indexer, attention, grad_kl, **options), first, strict=True):
                assert torch.equal(got, want)


def test_no_keys_at_all():
    query, key = draw(5, 0, 64)
    query.requires_grad_()
    out, lse = sparse_mla(query, key, torch.full((5, 3), -1, device="cuda"), SCALE, RANK)
    out.sum().backward()
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert query.grad.eq(0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("deterministic")
def test_tensors_on_another_device_than_the_current_one():
    from mla_attention.fusions import indexer_topk

    (q, k, w), (query, key) = indexer_inputs(300, 300, 64, 32)
    found = []
    for device in ("cuda:0", "cuda:1"):
        tensors = [t.detach().to(device).requires_grad_() for t in (q, k, w, query, key)]
        indices = indexer_topk(*tensors[:3], 64)
        out, lse = sparse_mla(*tensors[3:], indices, SCALE, RANK)
        sparse = indexer_kl(*tensors, SCALE, topk_indices=indices, lse=lse)
        loss = out.float().sum() + sparse.sum() + indexer_kl(*tensors, SCALE).sum()
        results = (indices, out, lse, sparse, *torch.autograd.grad(loss, tensors))
        assert {t.device for t in results} == {torch.device(device)}
        found.append([t.cpu() for t in results])
    assert torch.cuda.current_device() == 0
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
