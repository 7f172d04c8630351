"""Rows, positions and attention of every context-parallel rank, one process playing each in turn."""

import pytest
import torch
from torch import Tensor

from mla_attention import PackedSeqParams, RotaryEmbedding, shard_sequence_for_cp
from mla_attention.core_attention import zigzag as attention
from mla_attention.core_attention.eager import EagerAttention, masked_softmax, shard_mask
from mla_attention.core_attention.flex import FlexAttention
from mla_attention.core_attention.sdpa import SDPAttention
from mla_attention.fusions.rope.positions_reference import packed_positions
from mla_attention.token_layout import TokenLayout
from mla_attention.zigzag import key_order, rows_of_rank

CPU = torch.device("cpu")


def dealt(length: int, rank: int, size: int) -> list[int]:
    """Positions of a rank, written out: chunks rank and 2*size-1-rank of 2*size."""
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]).tolist() if size > 1 else list(range(length))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("length", [8, 16, 24])
def test_one_sequence(length: int, size: int) -> None:
    rotary = RotaryEmbedding(8, 1e4)
    cos, _ = rotary.cos_sin(length, device="cpu")
    for rank in range(size):
        rows = shard_sequence_for_cp(torch.arange(length), rank, size)
        assert rows.tolist() == dealt(length, rank, size)
        assert torch.equal(rotary.cos_sin(length, device="cpu", cp_rank=rank, cp_size=size)[0], cos[rows])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[8], [16, 24], [8, 16, 24], [24, 0, 8], [0]])
def test_a_pack(lengths: list[int], size: int) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    pack = PackedSeqParams(offsets)
    rows = int(offsets[-1]) + 4  # four rows in no sequence
    seen = []
    for rank in range(size):
        own = shard_sequence_for_cp(torch.arange(rows), rank, size, packed_seq_params=pack)
        positions = [p for length in lengths for p in dealt(length, rank, size)]
        expected = [s + p for s, length in zip(offsets, lengths, strict=False) for p in dealt(length, rank, size)]
        inside = len(expected)
        assert own[:inside].tolist() == [int(row) for row in expected]
        assert packed_positions(offsets, rows // size, rank, size)[:inside].tolist() == positions
        seen += own.tolist()
    assert sorted(seen) == list(range(rows))
    order = key_order(rows, size, pack, CPU)
    assert order.rows.tolist() == seen
    assert torch.tensor(seen)[order.places].tolist() == list(range(rows))


def test_the_spec_numbers() -> None:
    pack = PackedSeqParams([0, 8, 24])
    first, second = (rows_of_rank(24, rank, 2, pack, CPU).tolist() for rank in range(2))
    assert first == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert second == [2, 3, 4, 5, *range(12, 20)]


def test_a_pack_keeps_its_order_only_where_the_host_has_read_its_offsets() -> None:
    checked, unread = PackedSeqParams([0, 8]), PackedSeqParams([0, 8], max_seqlen_q=8, validate=False)
    assert key_order(8, 2, checked, CPU).rows is key_order(8, 2, checked, CPU).rows
    assert key_order(8, 2, unread, CPU).rows is not key_order(8, 2, unread, CPU).rows


def layout(rank: int, size: int, rows: int, batch: int, pack: PackedSeqParams | None) -> TokenLayout:
    empty = torch.empty(0)
    order = key_order(rows, size, pack, CPU)
    return TokenLayout(batch, rows // size, empty, empty, pack, cp_rank=rank, cp_size=size, order=order)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, bias, lse, dropout, causal, debug, *, scale):
    """What torch's cuDNN operator answers, in plain torch."""
    assert (bias, lse, dropout, debug) == (None, True, 0.0, False)
    assert k.shape[2] > 1  # which cuDNN refuses
    logits = q @ k.mT * scale
    if causal:
        assert q.shape[2] == k.shape[2]
        logits = logits.masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
    sums = logits.logsumexp(-1, keepdim=True)
    seed = torch.zeros(())
    return (logits - sums).exp() @ v, sums, None, None, q.shape[2], k.shape[2], seed, seed, None


def cudnn_backward(g, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale):
    assert (bias, cum_q, cum_k, max_q, max_k) == (None, None, None, q.shape[2], k.shape[2])
    logits = q @ k.mT * scale
    if causal:
        logits = logits.masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
    p = (logits - lse).exp()
    dlogits = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
    return dlogits @ k, dlogits.mT @ q, p.mT @ g


def causal_only(*arguments, scale):
    """The backward for rows and keys of one number, causally; chunks of one row are below the limit."""
    assert arguments[-1] or arguments[1].shape[2] == 1
    return cudnn_backward(*arguments, scale=scale)


class Cudnn(SDPAttention):
    """The two-part path with cuDNN's operators in plain torch."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        return attention.attend_with_cudnn(query, key, value, tokens, self.scale)


class CudnnTriangles(Cudnn):
    """The same, its backward by causal calls alone."""


PACKS = {"sequence": None, "pack": [0, 8, 8, 24], "tail": [0, 8, 16], "nothing": [0]}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("cls", [SDPAttention, EagerAttention, FlexAttention, Cudnn, CudnnTriangles])
def test_attention_of_each_rank(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, size: int) -> None:
    monkeypatch.setattr(attention, "_FORWARD", cudnn_forward)
    monkeypatch.setattr(attention, "_BACKWARD", cudnn_backward)
    if cls is CudnnTriangles:
        monkeypatch.setattr(attention, "_TRIANGLE_ROWS", 2)
        monkeypatch.setattr(attention, "_BACKWARD", causal_only)
    offsets = PACKS[name]
    pack = None if offsets is None else PackedSeqParams(offsets)
    rows, batch = 24, 1 if pack else 2
    torch.manual_seed(0)
    lead = (rows,) if pack else (rows, batch)
    query, key = (torch.randn(*lead, 3, 10, dtype=torch.float64, requires_grad=cls is not FlexAttention) for _ in "qk")
    value, gradient = (torch.randn(*lead, 3, 6, dtype=torch.float64) for _ in "vg")
    value.requires_grad_(cls is not FlexAttention)
    outside = rows - (offsets[-1] if offsets else rows)
    empty = torch.empty(0)
    whole = EagerAttention(10, 6, 0.4)(query, key, value, TokenLayout(batch, rows, empty, empty, pack))
    if outside:
        gradient[rows - outside :] = 0  # the layer gives these rows none
    for rank in range(size):
        own = shard_sequence_for_cp(torch.arange(rows), rank, size, packed_seq_params=pack)
        output = cls(10, 6, 0.4)(query[own], key, value, layout(rank, size, rows, batch, pack))
        inside = own < rows - outside
        assert torch.allclose(output[inside], whole[own][inside], rtol=1e-6, atol=1e-9)
        assert not output[~inside].any() or cls in (EagerAttention, FlexAttention)
        if cls is FlexAttention:
            continue
        if not inside.any():
            assert not output.requires_grad or not torch.autograd.grad(output.sum(), value)[0].any()
            continue
        found = torch.autograd.grad(output, (query, key, value), gradient[own], allow_unused=True)
        wanted = torch.autograd.grad(whole[own], (query, key, value), gradient[own], retain_graph=True)
        for f, w in zip(found, wanted, strict=True):
            assert torch.allclose(torch.zeros_like(w) if f is None else f, w, rtol=1e-6, atol=1e-9)


def test_rows_of_other_sequences_and_later_rows_are_masked() -> None:
    """The mask that eager attention and flex share, against one written out."""
    pack = PackedSeqParams([0, 8, 24])
    for rank in range(2):
        tokens = layout(rank, 2, 24, 1, pack)
        row = shard_sequence_for_cp(torch.arange(24), rank, 2, packed_seq_params=pack)
        allowed = attention_mask_written_out(row)
        assert torch.equal(~shard_mask(tokens), allowed)
        assert masked_softmax(torch.zeros(12, 24), ~allowed).sum(-1).allclose(torch.ones(12))


def attention_mask_written_out(row: Tensor) -> Tensor:
    keys = torch.arange(24)
    return torch.stack([(keys <= r) & ((keys < 8) == (r < 8)) for r in row])


def test_a_sum_over_squares_is_rounded_no_more_than_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of 4: its last chunk takes seven squares of earlier keys."""
    rows, size = 256, 4

    def forward(q, k, v, *rest, scale):
        output, lse, *others = cudnn_forward(q.double(), k.double(), v.double(), *rest, scale=scale)
        return output.bfloat16(), lse.float(), *others

    def backward(g, q, k, v, out, lse, *rest, scale):
        wide = (t.double() for t in (g, q, k, v, out, lse))
        return tuple(t.bfloat16() for t in cudnn_backward(*wide, *rest, scale=scale))

    monkeypatch.setattr(attention, "_FORWARD", forward)
    monkeypatch.setattr(attention, "_BACKWARD", backward)
    torch.manual_seed(0)
    query, key = (torch.randn(rows, 1, 4, 32).bfloat16().requires_grad_() for _ in "qk")
    value, gradient = (torch.randn(rows, 1, 4, 16).bfloat16() for _ in "vg")
    own = shard_sequence_for_cp(torch.arange(rows), 0, size)
    empty = torch.empty(0)
    exact = EagerAttention(32, 16, 0.2)(
        query.double(), key.double(), value.double(), TokenLayout(1, rows, empty, empty)
    )
    wanted = torch.autograd.grad(exact[own], query, gradient[own].double())[0][own].double()
    errors = []
    for triangle_rows in (rows, 2):
        monkeypatch.setattr(attention, "_TRIANGLE_ROWS", triangle_rows)
        local = query.detach()[own].requires_grad_()
        output = attention.attend_with_cudnn(local, key, value, layout(0, size, rows, 1, None), 0.2)
        found = torch.autograd.grad(output, local, gradient[own])[0].double()
        errors.append(((found - wanted).norm() / wanted.norm()).item())
    one_call, triangles = errors
    assert triangles <= 1.2 * one_call, errors
