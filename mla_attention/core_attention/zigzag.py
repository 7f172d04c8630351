"""Core attention of a context-parallel rank: its two chunks of each sequence against the keys of all ranks.

A chunk of c rows that starts at row o of its sequence attends to the keys 0 .. o+c-1: to the first o without a mask and
to its own c causally. Both parts go through cuDNN, which wants no mask tensor for either, and are merged by their
log-sum-exp:

    out = w * out_before + (1 - w) * out_own      w = sigmoid(lse_before - lse_own)
    lse = log(exp(lse_before) + exp(lse_own))

Backward hands the merged out and lse to cuDNN's backward for each part: probabilities exp(x - lse) and the correction
sum(dout * out) are then those of the whole row, so the parts' gradients add up to the whole one, however the pairs of
row and key are parted. cuDNN 9.19 on an H200 is slow there without a mask where v is narrower than q (192/128: 317
TFLOP/s, causally 489; 256/256: 362 and 382). Long chunks of such widths therefore take the earlier keys in squares of c
keys, and a square in two causal calls: on and below its diagonal, and, with rows and keys in reverse order, above it.

Source: the merge of ring attention (arXiv 2310.01889); here keys are gathered and nothing rotates.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from mla_attention.core_attention.interface import no_attention
from mla_attention.fusions.once_differentiable import once_differentiable
from mla_attention.token_layout import TokenLayout

_MERGE_HEADS = 8  # heads merged at once in fp32
_TRIANGLE_ROWS = 2048  # of a chunk, from which two causal calls beat one without a mask
_FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class Chunk(NamedTuple):
    """Rows of the rank that lie together in a sequence, and the keys that they attend to; the last keys are their own.

    Attributes:
        rows: slice of the rank's rows.
        keys: slice of the key axis, from the start of the sequence to the chunk's own end.
    """

    rows: slice
    keys: slice

    @property
    def own(self) -> slice:
        """The chunk's own rows on the key axis."""
        return slice(self.keys.stop - (self.rows.stop - self.rows.start), self.keys.stop)

    @property
    def before(self) -> slice:
        """The keys before them."""
        return slice(self.keys.start, self.own.start)


def chunks_of_rank(tokens: TokenLayout) -> list[Chunk]:
    """The non-empty chunks of a rank in the order of its rows, from lengths that the host knows.

    Raises:
        ValueError: if the host does not know them.
    """
    cp_rank, cp_size = tokens.cp_rank, tokens.cp_size
    chunks = []
    for start, end in pairwise(_offsets(tokens)):
        size = (end - start) // (2 * cp_size)
        row = start // cp_size
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            if size:
                chunks.append(Chunk(slice(row, row + size), slice(start, start + (index + 1) * size)))
            row += size
    return chunks


def _offsets(tokens: TokenLayout) -> tuple[int, ...]:
    """Start rows of the sequences on the key axis, and the end of the last."""
    if tokens.packed is None:
        return 0, tokens.key_rows
    if tokens.packed.host_offsets is None:
        raise ValueError(
            "packed_seq_params: built with validate=False, but this core attention needs the lengths on the host under "
            "context parallelism; allowed are validate=True, or the backends 'flex' and 'reference'"
        )
    return tokens.packed.host_offsets


def attend_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: TokenLayout,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention of a rank's rows, chunk by chunk; rows in no sequence give zeros.

    Args:
        query: `[rows, B, n, Dq]`, packed `[rows, n, Dq]`.
        key, value: of all ranks in global order, `[keys, B, n, D]`, packed `[keys, n, D]`.
        tokens: layout of the rows.
        attend: from q `[c, B, n, Dq]`, k and v `[o+c, B, n, D]`, q the rows of the last keys, to `[c, B, n, Dv]`.
    """
    packed = tokens.packed is not None
    if packed:
        query, key, value = query[:, None], key[:, None], value[:, None]
    cp_rank, cp_size = tokens.cp_rank, tokens.cp_size
    offsets = _offsets(tokens)
    lengths = [*(end - start for start, end in pairwise(offsets)), tokens.key_rows - offsets[-1]]
    # Split first: the gradient of a slice is as large as what it is a slice of.
    pieces = zip(query.split([n // cp_size for n in lengths]), key.split(lengths), value.split(lengths), strict=True)
    *sequences, (outside, _, value_outside) = pieces
    outputs = []
    for q, k, v in sequences:
        size = q.shape[0] // 2
        if size:
            first, last = (cp_rank + 1) * size, (2 * cp_size - cp_rank) * size
            outputs += [attend(q[:size], k[:first], v[:first]), attend(q[size:], k[:last], v[:last])]
    outputs.append(no_attention(query, key, value_outside[: outside.shape[0]]))
    output = torch.cat(outputs)
    return output[:, 0] if packed else output


def cudnn_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether cuDNN attention takes these `[S, B, n, D]` or `[T, n, D]` tensors, forward and backward."""
    if not query.is_cuda or query.shape[0] < 2:
        return False
    same = (query, key[: query.shape[0]], value[: query.shape[0]])  # as many keys as queries, as where it is causal
    q, k, v = ((t if t.dim() == 4 else t[:, None]).permute(1, 2, 0, 3) for t in same)
    return all(can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, causal, False)) for causal in (False, True))


def attend_with_cudnn(query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout, scale: float) -> Tensor:
    """As `attend_chunks`, each chunk in two cuDNN calls, without a mask and without copies of keys.

    Args:
        query: `[rows, B, n, Dq]`, packed `[rows, n, Dq]`.
        key, value: of all ranks in global order.
        tokens: layout of the rows.
        scale: factor on q.k.
    """
    packed = tokens.packed is not None
    if packed:
        query, key, value = query[:, None], key[:, None], value[:, None]
    output = _CudnnChunks.apply(query, key, value, chunks_of_rank(tokens), scale)
    return output[:, 0] if packed else output


class _Part(NamedTuple):
    """A chunk's attention to some of its keys."""

    output: Tensor  # [B, n, c, Dv]
    lse: Tensor  # fp32 at least, [B, n, c, 1]
    call: _Call | None


class _Call(NamedTuple):
    """What cuDNN's backward wants back of a forward."""

    lse_shape: torch.Size
    rest: tuple  # seed, offset, bias, cumulative and longest lengths

    def of_rows(self, rows: int) -> _Call:
        """The same for as many rows and keys."""
        batch, heads, _, *one = self.lse_shape
        return _Call(torch.Size((batch, heads, rows, *one)), (*self.rest[:-2], rows, rows))


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> _Part:
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    if k.shape[2] == 1:  # cuDNN wants two keys; to a single one every row attends wholly, causal or not
        return _Part(v.expand(-1, -1, q.shape[2], -1), _one_key_logits(q, k, scale), None)
    output, lse, *cumulative, max_q, max_k, seed, offset, _ = _FORWARD(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    call = _Call(lse.shape, (seed, offset, None, *cumulative, max_q, max_k))
    return _Part(output, lse.reshape(*output.shape[:3], 1), call)


def _attend_backward(
    views: tuple[Tensor, ...], lse: Tensor, call: _Call | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of one part; `views` are dout, q, k, v, out `[B, n, S, D]`, out and lse of the whole row."""
    if call is not None:
        return _BACKWARD(*views, lse.reshape(call.lse_shape), *call.rest, 0.0, causal, scale=scale)
    q, k, v = views[1:4]
    wide_gradient, wide_q, wide_k, wide_v, wide_output = (t.to(lse.dtype) for t in views)
    p = (_one_key_logits(q, k, scale) - lse).exp()
    dlogits = p * (wide_gradient * (wide_v - wide_output)).sum(-1, keepdim=True) * scale
    dk = (dlogits * wide_q).sum(2, keepdim=True)
    dv = (p * wide_gradient).sum(2, keepdim=True)
    return (dlogits * wide_k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _triangles_backward(views: tuple[Tensor, ...], lse: Tensor, call: _Call, scale: float) -> tuple[Tensor, ...]:
    """As `_attend_backward` without a mask, for keys that are a multiple of the rows, by causal calls alone; dq, a sum
    over the squares, in fp32 at least."""
    gradient, q, k, v, output = views
    size = q.shape[2]
    whole, less = call.of_rows(size), call.of_rows(size - 1)
    # Row i of the reversed square sees the keys up to its own index: those after its own, in the order that they lie.
    reversed_rows = tuple(_reversed_rows(t)[:, :, 1:] for t in (gradient, q, output))
    reversed_lse = lse.flip(2)[:, :, 1:].contiguous()
    dq: Tensor | None = None
    dkeys, dvalues = [], []
    for keys, values in zip(k.split(size, 2), v.split(size, 2), strict=True):
        lower = _attend_backward((gradient, q, keys, values, output), lse, whole, True, scale)
        g, rows, o = reversed_rows
        operands = (g, rows, _reversed_rows(keys)[:, :, :-1], _reversed_rows(values)[:, :, :-1], o)
        upper = _attend_backward(operands, reversed_lse, less, True, scale)
        dq = lower[0].to(lse.dtype) if dq is None else dq.add_(lower[0])
        dq[:, :, :-1] += upper[0].flip(2)
        for found, above in zip(lower[1:], upper[1:], strict=True):
            found[:, :, 1:] += above.flip(2)
        dkeys.append(lower[1])
        dvalues.append(lower[2])
    return cast(Tensor, dq), torch.cat(dkeys, 2), torch.cat(dvalues, 2)


def _reversed_rows(t: Tensor) -> Tensor:
    """`[B, n, S, D]` from last row to first, in memory `[S, B, n, D]`."""
    return t.permute(2, 0, 1, 3).flip(0).permute(1, 2, 0, 3)


def _in_triangles(q: Tensor, v: Tensor) -> bool:
    return q.shape[2] >= _TRIANGLE_ROWS and v.shape[3] < q.shape[3]


def _one_key_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q.k * scale `[B, n, c, 1]` of a single key, in fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return (q.to(wide) * k.to(wide)).sum(-1, keepdim=True) * scale


def _merge(before: _Part, own: _Part, merged: Tensor) -> Tensor:
    """Write the merged output `[B, n, c, Dv]`; returns its log-sum-exp."""
    weight = torch.sigmoid(before.lse - own.lse)
    for first in range(0, merged.shape[1], _MERGE_HEADS):
        heads = (slice(None), slice(first, first + _MERGE_HEADS))
        mixed = torch.lerp(own.output[heads].to(weight.dtype), before.output[heads].to(weight.dtype), weight[heads])
        merged[heads].copy_(mixed)
    return torch.logaddexp(before.lse, own.lse)


class _CudnnChunks(torch.autograd.Function):
    """query `[rows, B, n, Dq]`, key and value `[keys, B, n, D]` -> `[rows, B, n, Dv]`."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, chunks: list[Chunk], scale: float) -> Tensor:
        output = value.new_empty(*query.shape[:-1], value.shape[-1])
        lses: list[Tensor] = []
        calls: list[list[_Call | None]] = []
        for chunk in chunks:
            q = query[chunk.rows]
            own = _attend(q, key[chunk.own], value[chunk.own], True, scale)
            merged = output[chunk.rows].permute(1, 2, 0, 3)
            if chunk.before.start == chunk.before.stop:
                merged.copy_(own.output)
                lses.append(own.lse)
                calls.append([own.call])
            else:
                before = _attend(q, key[chunk.before], value[chunk.before], False, scale)
                lses.append(_merge(before, own, merged))
                calls.append([own.call, before.call])
        output[chunks[-1].rows.stop if chunks else 0 :].zero_()
        ctx.save_for_backward(query, key, value, output, *lses)
        ctx.chunks, ctx.calls, ctx.scale = chunks, calls, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        query, key, value, output, *lses = ctx.saved_tensors
        gradient = gradient.contiguous()  # because of torch's cache of cuDNN plans (sdpa.py)
        dquery = torch.empty_like(query, memory_format=torch.contiguous_format)
        dkey = torch.zeros_like(key, memory_format=torch.contiguous_format)
        dvalue = torch.zeros_like(value, memory_format=torch.contiguous_format)
        for chunk, lse, calls in zip(ctx.chunks, lses, ctx.calls, strict=True):
            found: Tensor | None = None
            for keys, causal, call in zip((chunk.own, chunk.before), (True, False), calls, strict=False):
                rows = chunk.rows
                operands = (gradient[rows], query[rows], key[keys], value[keys], output[rows])
                views = tuple(t.permute(1, 2, 0, 3) for t in operands)
                if not causal and call is not None and _in_triangles(views[1], views[3]):
                    dq, dk, dv = _triangles_backward(views, lse, call, ctx.scale)
                else:
                    dq, dk, dv = _attend_backward(views, lse, call, causal, ctx.scale)
                dkey[keys] += dk.permute(2, 0, 1, 3)
                dvalue[keys] += dv.permute(2, 0, 1, 3)
                found = dq if found is None else dq.add_(found)
            if found is not None:
                dquery[chunk.rows] = found.permute(2, 0, 1, 3)
        dquery[ctx.chunks[-1].rows.stop if ctx.chunks else 0 :].zero_()
        return dquery, dkey, dvalue, None, None
