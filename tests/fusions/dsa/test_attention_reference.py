"""The unfused twins of sparse_mla and indexer_kl against dense masked attention, fp64 gradcheck and closed forms."""

import math

import pytest
import torch

from mla_attention.fusions.dsa.attention_reference import indexer_kl, sparse_mla


def draw(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def distinct_rows(rows: int, keys: int, slots: int) -> torch.Tensor:
    return torch.stack([torch.randperm(keys)[:slots] for _ in range(rows)])


def dense_masked(query, key, allowed, scale, rank):
    scores = torch.einsum("tnd,sd->tns", query, key) * scale
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    return scores.softmax(-1) @ key[:, :rank], scores.logsumexp(-1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("slots", [1, 4, 9])
def test_sparse_mla_equals_dense_masked_attention(slots):
    query, key = draw(5, 3, 6), draw(9, 6)
    indices = distinct_rows(5, 9, slots)
    allowed = torch.zeros(5, 9, dtype=torch.bool).scatter_(1, indices, True)
    grad_out, grad_lse = draw(5, 3, 4, grad=False), draw(5, 3, grad=False)
    expected = dense_masked(query, key, allowed, 0.3, 4)
    actual = sparse_mla(query, key, indices, 0.3, 4)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)
    got = torch.autograd.grad(actual, (query, key), (grad_out, grad_lse))
    want = torch.autograd.grad(expected, (query, key), (grad_out, grad_lse))
    torch.testing.assert_close(got, want)


def test_sparse_mla_gradcheck_with_unused_slots():
    query, key = draw(4, 2, 5), draw(7, 5)
    indices = distinct_rows(4, 7, 4)
    indices[0, 0] = indices[1, 2] = indices[3, 3] = -1
    indices[2] = -1
    full = [0, 1, 3]
    assert torch.autograd.gradcheck(
        lambda q, k: (sparse_mla(q, k, indices, 0.5, 3)[0], sparse_mla(q, k, indices, 0.5, 3)[1][full]), (query, key)
    )


def test_sparse_mla_row_with_nothing_selected():
    query, key = draw(3, 2, 5), draw(4, 5)
    indices = torch.tensor([[0, 2], [-1, -1], [3, -1]])
    out, lse = sparse_mla(query, key, indices, 0.5, 3)
    (out.sum() + lse[[0, 2]].sum()).backward()
    assert out[1].eq(0).all()
    assert lse[1].eq(-torch.inf).all()
    assert query.grad[1].eq(0).all()
    assert key.grad[1].eq(0).all()
    assert key.grad.isfinite().all()


def test_sparse_mla_ignores_nan_keys_that_are_not_selected():
    query, key = draw(2, 2, 5), draw(4, 5, grad=False)
    key[0] = torch.nan
    out, lse = sparse_mla(query, key.requires_grad_(), torch.tensor([[1, -1], [-1, 3]]), 0.5, 3)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    out.sum().backward()
    assert query.grad.isfinite().all()


def test_sparse_mla_tiles_do_not_change_the_result(monkeypatch):
    from mla_attention.fusions.dsa import attention_reference

    query, key, indices = draw(6, 2, 5), draw(7, 5), distinct_rows(6, 7, 3)
    whole = sparse_mla(query, key, indices, 0.5, 3)[0]
    want = torch.autograd.grad(whole.square().sum(), (query, key))
    monkeypatch.setattr(attention_reference, "_SPARSE_TILE_BYTES", 1)
    tiled = sparse_mla(query, key, indices, 0.5, 3)[0]
    torch.testing.assert_close(tiled, whole)
    torch.testing.assert_close(torch.autograd.grad(tiled.square().sum(), (query, key)), want)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("support", ["dense", "sparse", "packed", "tiled"])
def test_indexer_kl_gradcheck(support, relu):
    query, key = draw(5, 2, 5), draw(6, 5)
    index_q, index_k, weights = draw(5, 3, 4), draw(6, 4), draw(5, 3)
    options = {
        "dense": {},
        "sparse": {"topk_indices": torch.tensor([[0, -1, -1], [-1, 1, 0], [2, 0, 1], [-1, -1, -1], [1, 4, 3]])},
        "packed": {"cu_seqlens": torch.tensor([0, 2, 2, 4])},
        "tiled": {"budget_bytes": 1},
    }[support]
    assert torch.autograd.gradcheck(
        lambda *indexer: indexer_kl(*indexer, query, key, 0.4, relu=relu, **options), (index_q, index_k, weights)
    )
    loss = indexer_kl(index_q, index_k, weights, query, key, 0.4, relu=relu, **options).sum()
    assert torch.autograd.grad(loss, (query, key), allow_unused=True) == (None, None)


def indexer_with_scores(scores: torch.Tensor):
    """index_q, index_k and index_weights of one head whose score of key s is scores[s] for every row."""
    keys = scores.numel()
    index_q = scores.abs()[None, None].expand(keys, 1, keys).clone()
    index_k = torch.diag(scores.sign()).to(scores)
    return index_q, index_k, torch.ones(keys, 1, dtype=scores.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_indexer_kl_has_no_epsilon(dtype):
    index_q, index_k, weights = indexer_with_scores(torch.tensor([math.log(1e-12), 0.0], dtype=dtype))
    query = torch.tensor([[[0.0, 0.0]], [[3000.0, 0.0]]], dtype=dtype)  # row 1 puts everything on key 0: target [1, 0]
    key = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=dtype)
    leaves = [tensor.requires_grad_() for tensor in (index_q, index_k, weights)]
    kl = indexer_kl(*leaves, query, key, 1.0, relu=False)
    assert kl[0] == 0
    assert kl[1].item() == pytest.approx(27.631, abs=1e-3)
    kl[1].backward()
    assert float(weights.grad[1, 0]) == pytest.approx(
        -math.log(1e-12), rel=1e-6
    )  # sum_s (predicted - target)[s] * I[s]


def test_indexer_kl_gradient_is_predicted_minus_target():
    keys = 4
    scores = draw(keys, grad=False)
    # with unit keys index_q[t, 0] is the score row itself, so its gradient is d kl / d I
    index_q = scores.expand(keys, 1, keys).clone().requires_grad_()
    index_k, weights = torch.eye(keys, dtype=scores.dtype), torch.ones(keys, 1, dtype=scores.dtype)
    query, key = draw(keys, 2, 5, grad=False), draw(keys, 5, grad=False)
    indexer_kl(index_q, index_k, weights, query, key, 0.4, relu=False)[-1].backward()
    target = (torch.einsum("nd,sd->ns", query[-1], key) * 0.4).softmax(-1).mean(0)
    torch.testing.assert_close(index_q.grad[-1, 0], scores.softmax(-1) - target)
    assert index_q.grad[:-1].eq(0).all()


def test_indexer_kl_sparse_over_all_keys_equals_dense():
    query, key = draw(5, 2, 5), draw(5, 5)
    indexer = draw(5, 3, 4), draw(5, 4), draw(5, 3)
    causal = torch.arange(7).expand(5, 7)
    causal = torch.where(causal <= torch.arange(5)[:, None], causal, -1)
    dense = indexer_kl(*indexer, query, key, 0.4)
    sparse = indexer_kl(*indexer, query, key, 0.4, topk_indices=causal)
    torch.testing.assert_close(sparse, dense)
    lse = sparse_mla(query, key, causal, 0.4, 3)[1]
    torch.testing.assert_close(indexer_kl(*indexer, query, key, 0.4, lse=lse), dense)
    shifted = indexer_kl(
        *(t[2:] if i != 1 else t for i, t in enumerate(indexer)), query[2:], key, 0.4, q_positions=torch.arange(2, 5)
    )
    torch.testing.assert_close(shifted, dense[2:])


def test_indexer_kl_drops_selected_keys_outside_the_rows_sequence():
    query, key = draw(4, 2, 5), draw(4, 5)
    indexer = draw(4, 3, 4), draw(4, 4), draw(4, 3)
    everything = torch.arange(4).expand(4, 4)
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    packed = indexer_kl(*indexer, query, key, 0.4, cu_seqlens=offsets)
    torch.testing.assert_close(
        indexer_kl(*indexer, query, key, 0.4, topk_indices=everything, cu_seqlens=offsets), packed
    )
    assert packed[3] == 0


def test_zero_tokens_and_zero_keys():
    query, key = draw(0, 2, 5), draw(4, 5)
    indices = torch.zeros(0, 3, dtype=torch.int32)
    out, lse = sparse_mla(query, key, indices, 0.5, 3)
    assert out.shape == (0, 2, 3)
    assert lse.shape == (0, 2)
    out.sum().backward()
    assert key.grad.eq(0).all()
    indexer = draw(0, 3, 4), draw(4, 4), draw(0, 3)
    assert indexer_kl(*indexer, query, key, 0.5).shape == (0,)
    assert indexer_kl(*indexer, query, key, 0.5, topk_indices=indices).shape == (0,)
    out, _ = sparse_mla(draw(2, 2, 5), draw(0, 5), torch.full((2, 3), -1), 0.5, 3)
    assert out.eq(0).all()
