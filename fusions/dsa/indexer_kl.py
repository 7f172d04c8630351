"""Divergence between attention and indexer: the public function, its operators and its autograd rule.

    kl[t] = sum_s target[s] * (log target[s] - log softmax(I[t])[s])
    d kl[t] / d I[t, s] = softmax(I[t])[s] - target[s]

with target the head-summed attention probabilities of the row's support. Query rows are walked in tiles of at most
budget_bytes; a tile needs the target, the indexer's scores and a pass over their rows, and under tensor parallelism one
all-reduce of the target. Selected keys (indexer_kl_sparse.py): d kl / d I is kept, fp32 [T, padded K], so that the
backward pass works on the support alone. All keys (indexer_kl_dense.py): nothing of that size is kept; the backward
pass forms target and scores of a tile again and stays free of atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce

from ..host_checks import check_kernel_device
from ..once_differentiable import once_differentiable
from . import attention_checks as checks
from .indexer_kl_dense import dense_head_sums, dense_indexer_gradient, dense_lse
from .indexer_kl_sparse import head_sums_on_slots, indexer_gradient_on_slots, scores_on_slots
from .indexer_scores import launch_scores
from .key_ranges import key_ranges
from .kl_rows import kl_rows
from .operator import operator
from .sparse_mla import pack_slots_op
from .sparse_mla_forward import launch_forward
from .sparse_tiles import interpreted

_ROW_MULTIPLE = 64


@operator("attention_lse")
def _lse(
    query: Tensor,
    key: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    softmax_scale: float,
) -> Tensor:
    if slots is not None:
        split = _split(query.shape[2])
        return launch_forward(query, key, slots, end, softmax_scale, split, write_out=False)[1]
    return dense_lse(query, key, begin, end, softmax_scale)


@_lse.register_fake
def _(
    query: Tensor,
    key: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    softmax_scale: float,
) -> Tensor:
    return query.new_empty(query.shape[:2], dtype=torch.float32)


@operator("attention_head_sums")
def _head_sums(
    query: Tensor,
    key: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> Tensor:
    if slots is not None:
        return head_sums_on_slots(query, key, slots, end, lse, softmax_scale, _split(query.shape[2]))
    sums = torch.zeros(query.shape[0], key.shape[0], dtype=torch.float32, device=query.device)
    dense_head_sums(query, key, begin, end, lse, softmax_scale, sums)
    return sums


@_head_sums.register_fake
def _(
    query: Tensor,
    key: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> Tensor:
    columns = key.shape[0] if slots is None else slots.shape[1]
    return query.new_empty((query.shape[0], columns), dtype=torch.float32)


@operator("indexer_kl_rows")
def _divergence(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    target: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    relu: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    if slots is not None:
        scores = scores_on_slots(index_q, index_k, index_weights, slots, end, relu=relu)
    else:
        scores = torch.empty_like(target)
        if scores.numel():
            launch_scores(index_q, index_k, index_weights, scores, relu=relu, begin=begin, end=end, fill=False)
    kl = kl_rows(scores, target, begin, end, overwrite_scores=gradient)
    return kl, scores


@_divergence.register_fake
def _(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    target: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    relu: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    return target.new_empty((target.shape[0],)), torch.empty_like(target)


@operator("indexer_kl_gradient")
def _gradient(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    gradient: Tensor,
    grad_kl: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    relu: bool,
    ordered: bool,
    budget_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if slots is not None:
        return indexer_gradient_on_slots(
            index_q,
            index_k,
            index_weights,
            gradient,
            grad_kl,
            slots,
            end,
            relu=relu,
            ordered=ordered,
            scratch_bytes=budget_bytes,
        )
    return dense_indexer_gradient(index_q, index_k, index_weights, gradient, grad_kl, begin, end, relu=relu)


@_gradient.register_fake
def _(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    gradient: Tensor,
    grad_kl: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    relu: bool,
    ordered: bool,
    budget_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_k = index_k.new_empty(index_k.shape, dtype=torch.float32)
    return torch.empty_like(index_q), grad_k, torch.empty_like(index_weights)


class _IndexerKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        query: Tensor,
        key: Tensor,
        slots: Tensor | None,
        begin: Tensor,
        end: Tensor,
        lse: Tensor | None,
        softmax_scale: float,
        relu: bool,
        tp_group: ProcessGroup | None,
        budget_bytes: int,
    ) -> Tensor:
        ctx.dtypes = index_weights.dtype, index_k.dtype
        ctx.sparse = slots is not None
        ctx.options = softmax_scale, relu, tp_group, budget_bytes
        index_q, index_k, weights = index_q.contiguous(), index_k.contiguous(), index_weights.float().contiguous()
        query, key = query.contiguous(), key.contiguous()
        if lse is None:
            lse = _lse(query, key, slots, begin, end, softmax_scale)
        lse = lse.float().contiguous()
        kept = slots.shape if slots is not None and any(ctx.needs_input_grad[:3]) else None
        kl = torch.empty(query.shape[0], dtype=torch.float32, device=query.device)
        gradient = torch.empty(kept or (0,), dtype=torch.float32, device=query.device)
        for rows in _row_tiles(query, key, slots, budget_bytes):
            tile = None if slots is None else slots[rows], begin[rows], end[rows]
            target = _target(query[rows], key, *tile, lse[rows], softmax_scale, tp_group)
            kl[rows], scores = _divergence(index_q[rows], index_k, weights[rows], target, *tile, relu, kept is not None)
            if kept is not None:
                gradient[rows] = scores
            del target, scores  # before the next tile's are allocated
        if slots is not None:
            ctx.save_for_backward(index_q, index_k, weights, gradient, slots, begin, end)
        else:
            ctx.save_for_backward(index_q, index_k, weights, query, key, lse, begin, end)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        softmax_scale, relu, tp_group, budget_bytes = ctx.options
        grad_kl = grad_kl.float().contiguous()
        if ctx.sparse:
            index_q, index_k, weights, gradient, slots, begin, end = ctx.saved_tensors
            ordered = torch.are_deterministic_algorithms_enabled()
            grad_q, grad_k, grad_weights = _gradient(
                index_q, index_k, weights, gradient, grad_kl, slots, begin, end, relu, ordered, budget_bytes
            )
        else:
            index_q, index_k, weights, query, key, lse, begin, end = ctx.saved_tensors
            grad_q, grad_weights = torch.empty_like(index_q), torch.empty_like(weights)
            grad_k = torch.zeros(index_k.shape, dtype=torch.float32, device=index_k.device)
            for rows in _row_tiles(query, key, None, budget_bytes):
                tile = None, begin[rows], end[rows]
                target = _target(query[rows], key, *tile, lse[rows], softmax_scale, tp_group)
                _, gradient = _divergence(index_q[rows], index_k, weights[rows], target, *tile, relu, True)
                del target
                grad_q[rows], share, grad_weights[rows] = _gradient(
                    index_q[rows], index_k, weights[rows], gradient, grad_kl[rows], *tile, relu, True, budget_bytes
                )
                grad_k += share
                del gradient
        weights_dtype, key_dtype = ctx.dtypes
        return (grad_q, grad_k.to(key_dtype), grad_weights.to(weights_dtype), *(None,) * 10)


def _target(
    query: Tensor,
    key: Tensor,
    slots: Tensor | None,
    begin: Tensor,
    end: Tensor,
    lse: Tensor,
    softmax_scale: float,
    tp_group: ProcessGroup | None,
) -> Tensor:
    """Head-summed probabilities of a tile, over every rank's heads."""
    target = _head_sums(query, key, slots, begin, end, lse, softmax_scale)
    if tp_group is not None:
        all_reduce(target, group=tp_group)
    return target


def _row_tiles(query: Tensor, key: Tensor, slots: Tensor | None, budget_bytes: int) -> Iterator[slice]:
    """Row ranges whose target and scores, fp32 each, fit the budget; they start at aligned rows where it allows."""
    columns = key.shape[0] if slots is None else slots.shape[1]
    step = max(1, budget_bytes // max(1, 8 * columns))
    if step > _ROW_MULTIPLE:
        step -= step % _ROW_MULTIPLE
    for start in range(0, query.shape[0], step):
        yield slice(start, min(start + step, query.shape[0]))


def _split(width: int) -> int:
    """The largest power of two below the width: two tiles hold the channels with little padding."""
    return 1 << ((width - 1).bit_length() - 1)


def indexer_kl(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    *,
    topk_indices: Tensor | None = None,
    relu: bool = True,
    cu_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    lse: Tensor | None = None,
    budget_bytes: int = 2**30,
) -> Tensor:
    """Kullback-Leibler divergence per query row between the attention's head-summed probabilities and the indexer.

        P_h[s]    = softmax over the row's support of softmax_scale * query[t, h] . key[s]      (detached)
        target[s] = sum_h P_h[s] / sum_s' sum_h P_h[s']                                 (sum_h over tp_group too)
        I[s]      = sum_h index_weights[t, h] * relu(index_q[t, h] . index_k[s])
        kl[t]     = sum_s target[s] * (log target[s] - log softmax(I)[s])            0 log 0 = 0, no epsilon

    so that d kl[t] / d I[s] = softmax(I)[s] - target[s]. The support is the row's `topk_indices`, or without them every
    key of the row's own sequence up to the row itself.

    Args:
        index_q: indexer queries [T, Hi, Di]; float16, bfloat16 or float32.
        index_k: indexer keys [S, Di], index_q's dtype.
        index_weights: head weights [T, Hi], any of these dtypes (fp32 usual), all scales folded in.
        query: absorbed queries [T, n, R + Dr] of this rank's heads; takes no gradient.
        key: shared keys [S, R + Dr], query's dtype; takes no gradient.
        softmax_scale: factor of the attention scores, finite and >= 0.
        topk_indices: support [T, K], int32 or int64, -1 = unused slot anywhere, the same on every rank of tp_group.
        relu: clip negative dot products of the indexer at 0 (the gradient at exactly 0 is 0).
        cu_seqlens: sequence offsets over the keys [sequences + 1]; a row at or past the last offset has no
            support. None: one sequence. With topk_indices: selected keys outside the row's sequence are dropped.
        q_positions: global key index of each query row [T]; None: 0 .. T-1. With topk_indices: later ones are dropped.
        tp_group: process group over whose ranks the heads are spread; the head sums are all-reduced over it.
        lse: natural log-sum-exp of the attention scores over the same support [T, n] (as `sparse_mla` returns it);
            computed when None.
        budget_bytes: most bytes of the score tiles that are alive at once.

    Returns:
        kl fp32 [T]; 0 for a row with an empty support. Differentiable in index_q, index_k and index_weights only. With
        topk_indices the gradient in I, fp32 [T, padded K], is kept for the backward pass; without them every pass over
        the keys is repeated there.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; under MLA_ATTENTION_VALIDATE=1 also values out of range.
        RuntimeError: CPU tensors, outside Triton's interpreter.

    Source: DeepSeek-V3.2, equations of the dense warm-up and the sparse training stage of the lightning indexer.
    """
    checks.check_query_and_key(query, key, softmax_scale, allow_double=False)
    checks.check_indexer(index_q, index_k, index_weights, query, key, allow_double=False)
    checks.check_indexer_widths(index_q, query)
    checks.check_positions(query, key.shape[0], cu_seqlens, q_positions, lse)
    checks.check_budget(budget_bytes)
    if topk_indices is not None:
        checks.check_topk_indices(topk_indices, query, key.shape[0])
    check_kernel_device("indexer_kl", query, interpreted())
    slots = None
    begin, end = key_ranges(
        query.shape[0], key.shape[0], device=query.device, cu_seqlens=cu_seqlens, q_positions=q_positions
    )
    if topk_indices is not None:
        bounds = (None, None) if cu_seqlens is None and q_positions is None else (begin, end)
        slots, end = pack_slots_op(topk_indices.contiguous(), *bounds)
        begin = torch.zeros_like(end)
    return _IndexerKL.apply(
        index_q,
        index_k,
        index_weights,
        query.detach(),
        key.detach(),
        slots,
        begin,
        end,
        None if lse is None else lse.detach(),
        float(softmax_scale),
        relu,
        tp_group,
        budget_bytes,
    )
