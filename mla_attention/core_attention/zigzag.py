"""Core attention of a context-parallel rank: its two chunks of each sequence against the keys of all ranks.

A chunk of c rows that starts at row o of its sequence attends to the keys 0 .. o+c-1: to the first o without a mask and
to its own c causally. Both parts go through cuDNN, which wants no mask tensor for either, and are merged by their
log-sum-exp:

    out = w * out_before + (1 - w) * out_own      w = sigmoid(lse_before - lse_own)
    lse = log(exp(lse_before) + exp(lse_own))

Backward hands the merged out and lse to cuDNN's backward for each part: probabilities exp(x - lse) and the correction
sum(dout * out) are then those of the whole row, so the parts' gradients add up to the whole one.

Source: the merge of ring attention (arXiv 2310.01889); here keys are gathered and nothing rotates.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from mla_attention.token_layout import TokenLayout

_MERGE_HEADS = 8  # heads merged at once in fp32
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
    if tokens.packed is None:
        offsets: tuple[int, ...] = (0, tokens.key_rows)
    elif tokens.packed.host_offsets is None:
        raise ValueError(
            "packed_seq_params: built with validate=False, but this core attention needs the lengths on the host under "
            "context parallelism; allowed are validate=True, or the backends 'flex' and 'reference'"
        )
    else:
        offsets = tokens.packed.host_offsets
    chunks = []
    for start, end in pairwise(offsets):
        size = (end - start) // (2 * cp_size)
        row = start // cp_size
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            if size:
                chunks.append(Chunk(slice(row, row + size), slice(start, start + (index + 1) * size)))
            row += size
    return chunks


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
    chunks = chunks_of_rank(tokens)
    outputs = [attend(query[chunk.rows], key[chunk.keys], value[chunk.keys]) for chunk in chunks]
    outside = query.shape[0] - (chunks[-1].rows.stop if chunks else 0)
    if outside:
        outputs.append(value[:outside].masked_fill(torch.ones((), dtype=torch.bool, device=value.device), 0))
    output = torch.cat(outputs)
    return output[:, 0] if packed else output


def cudnn_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether cuDNN attention takes these `[S, B, n, D]` or `[T, n, D]` tensors, forward and backward."""
    if not query.is_cuda or query.shape[0] == 0:
        return False
    q, k, v = ((t if t.dim() == 4 else t[:, None]).permute(1, 2, 0, 3) for t in (query, key, value))
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
    """What cuDNN's backward wants of a forward call beside tensors."""

    output: Tensor
    lse: Tensor
    rest: tuple  # cumulative lengths, longest lengths, seed, offset


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> _Part:
    output, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _FORWARD(
        *(t.permute(1, 2, 0, 3) for t in (query, key, value)), None, True, 0.0, causal, False, scale=scale
    )
    return _Part(output, lse, (seed, offset, None, cum_q, cum_k, max_q, max_k))


def _merge(before: _Part, own: _Part, merged: Tensor) -> Tensor:
    """Write the merged output `[B, n, c, Dv]`; returns its log-sum-exp."""
    weight = torch.sigmoid(before.lse - own.lse).view(*before.output.shape[:3], 1)
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
        rests: list[tuple[Any, ...]] = []
        for chunk in chunks:
            q = query[chunk.rows]
            own = _attend(q, key[chunk.own], value[chunk.own], True, scale)
            merged = output[chunk.rows].permute(1, 2, 0, 3)
            if chunk.before.start == chunk.before.stop:
                merged.copy_(own.output)
                lses.append(own.lse)
                rests.append((own.rest,))
            else:
                before = _attend(q, key[chunk.before], value[chunk.before], False, scale)
                lses.append(_merge(before, own, merged))
                rests.append((own.rest, before.rest))
        output[chunks[-1].rows.stop if chunks else 0 :].zero_()
        ctx.save_for_backward(query, key, value, output, *lses)
        ctx.chunks, ctx.rests, ctx.scale = chunks, rests, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        query, key, value, output, *lses = ctx.saved_tensors
        dquery = torch.empty_like(query, memory_format=torch.contiguous_format)
        dkey = torch.zeros_like(key, memory_format=torch.contiguous_format)
        dvalue = torch.zeros_like(value, memory_format=torch.contiguous_format)
        for chunk, lse, rests in zip(ctx.chunks, lses, ctx.rests, strict=True):
            parts = [(chunk.own, True), (chunk.before, False)][: len(rests)]
            found: Tensor | None = None
            for (keys, causal), rest in zip(parts, rests, strict=True):
                dq, dk, dv = _BACKWARD(
                    *(t.permute(1, 2, 0, 3) for t in (gradient[chunk.rows], query[chunk.rows])),
                    *(t[keys].permute(1, 2, 0, 3) for t in (key, value)),
                    output[chunk.rows].permute(1, 2, 0, 3),
                    lse,
                    *rest,
                    0.0,
                    causal,
                    scale=ctx.scale,
                )
                dkey[keys] += dk.permute(2, 0, 1, 3)
                dvalue[keys] += dv.permute(2, 0, 1, 3)
                found = dq if found is None else found.add_(dq)
            if found is not None:
                dquery[chunk.rows] = found.permute(2, 0, 1, 3)
        dquery[ctx.chunks[-1].rows.stop if ctx.chunks else 0 :].zero_()
        return dquery, dkey, dvalue, None, None
