"""Unfused twins of `sparse_mla` and `indexer_kl`: plain torch, differentiable, any device.

They state the algorithms and are the oracle of the kernels. Everything is computed in at least fp32 (fp64 for fp64
inputs). Query rows are walked in tiles under a byte budget, and each tile is recomputed in the backward pass, so no
[T, T] tensor outlives its tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce
from torch.utils.checkpoint import checkpoint

from . import attention_checks as checks
from .key_ranges import key_ranges

_SPARSE_TILE_BYTES = 2**28


def sparse_mla(
    query: Tensor, key: Tensor, topk_indices: Tensor, softmax_scale: float, kv_rank: int
) -> tuple[Tensor, Tensor]:
    """Attend, per token, to its selected rows of one key shared by all heads; the value is the key's latent part.

        x[t, h, j] = softmax_scale * query[t, h] . key[topk_indices[t, j]]      (slots of -1 take no part)
        lse[t, h]  = log sum_j exp(x[t, h, j])
        out[t, h]  = sum_j exp(x[t, h, j] - lse[t, h]) * key[topk_indices[t, j], :kv_rank]

    Args:
        query: absorbed queries [T, n, R + Dr]; float16, bfloat16, float32 or float64.
        key: normed latent and rotated shared rope key [S, R + Dr], query's dtype.
        topk_indices: selected key rows [T, K], int32 or int64, -1 = unused slot anywhere, otherwise distinct in a row.
        softmax_scale: factor of the scores, finite and >= 0.
        kv_rank: R, the width of the value.

    Returns:
        (out, lse): latent output [T, n, R] in query's dtype and natural log-sum-exp [T, n] in fp32 (fp64 for fp64
        input), both differentiable in query and key. A row with nothing selected has output 0, lse -inf, gradient 0.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; under MLA_ATTENTION_VALIDATE=1 also bad or repeated indices.

    Source: DeepSeek-V3.2 (sparse attention in the absorbed, multi-query form of MLA).
    """
    checks.check_query_and_key(query, key, softmax_scale, allow_double=True)
    checks.check_kv_rank(kv_rank, query.shape[2])
    checks.check_topk_indices(topk_indices, query, key.shape[0])
    wide = _wide_dtype(query.dtype)
    bytes_per_row = topk_indices.shape[1] * (query.shape[2] + 2 * query.shape[1]) * wide.itemsize

    def attend(query_rows: Tensor, key: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        selected = indices >= 0
        gathered = _gather_rows(key.to(wide), indices, selected)  # [t, K, R + Dr]
        scores = torch.einsum("tnd,tkd->tnk", query_rows.to(wide), gathered) * softmax_scale
        probabilities, lse = _masked_softmax(scores, selected[:, None, :])
        out = torch.einsum("tnk,tkr->tnr", probabilities, gathered[..., :kv_rank])
        return out.to(query_rows.dtype), lse

    tiles = [
        _run_tile(
            attend, len(rows), query.shape[0], query[rows.start : rows.stop], key, topk_indices[rows.start : rows.stop]
        )
        for rows in _row_tiles(query.shape[0], bytes_per_row, _SPARSE_TILE_BYTES)
    ]
    return torch.cat([out for out, _ in tiles]), torch.cat([lse for _, lse in tiles])


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
        index_q: indexer queries [T, Hi, Di]; float16, bfloat16, float32 or float64.
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
        kl [T] in fp32 (fp64 for fp64 input); 0 for a row with an empty support. Differentiable in index_q, index_k and
        index_weights only.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; under MLA_ATTENTION_VALIDATE=1 also values out of range.

    Source: DeepSeek-V3.2, equations of the dense warm-up and the sparse training stage of the lightning indexer.
    """
    checks.check_query_and_key(query, key, softmax_scale, allow_double=True)
    checks.check_indexer(index_q, index_k, index_weights, query, key, allow_double=True)
    checks.check_positions(query, key.shape[0], cu_seqlens, q_positions, lse)
    checks.check_budget(budget_bytes)
    if topk_indices is not None:
        checks.check_topk_indices(topk_indices, query, key.shape[0])
    wide = torch.promote_types(_wide_dtype(index_q.dtype), _wide_dtype(index_weights.dtype))
    begin, end = key_ranges(
        query.shape[0], key.shape[0], device=query.device, cu_seqlens=cu_seqlens, q_positions=q_positions
    )
    bounded = topk_indices is None or cu_seqlens is not None or q_positions is not None
    query, key = query.detach(), key.detach()
    lse = None if lse is None else lse.detach()
    num_slots = key.shape[0] if topk_indices is None else topk_indices.shape[1]
    width = 0 if topk_indices is None else query.shape[2] + index_q.shape[2]
    bytes_per_row = num_slots * (width + 2 * query.shape[1] + 2 * index_q.shape[1]) * wide.itemsize

    def divergence(q_rows: Tensor, k: Tensor, weights: Tensor, start: int, stop: int) -> Tensor:
        if topk_indices is None:
            slots = torch.arange(num_slots, device=query.device).expand(stop - start, num_slots)
        else:
            slots = topk_indices[start:stop]
        support = slots >= 0
        if bounded:
            support = support & (slots >= begin[start:stop, None]) & (slots < end[start:stop, None])
        with torch.no_grad():
            row_lse = None if lse is None else lse[start:stop]
            target = _head_sum(query[start:stop], key, slots, support, softmax_scale, row_lse, topk_indices is not None)
            if tp_group is not None:
                all_reduce(target, group=tp_group)
            total = target.sum(-1, keepdim=True)
            target = (target / torch.where(total > 0, total, 1.0)).to(wide)
        if topk_indices is None:
            dots = torch.einsum("thd,sd->ths", q_rows.to(wide), k.to(wide))
        else:
            dots = torch.einsum("thd,tkd->thk", q_rows.to(wide), _gather_rows(k.to(wide), slots, support))
        scores = torch.einsum("ths,th->ts", dots.relu() if relu else dots, weights.to(wide))
        predicted = torch.log_softmax(_fill_outside(scores, support), -1)
        return torch.where(target > 0, target * (target.log() - predicted), 0.0).sum(-1)

    tiles = [
        _run_tile(
            divergence,
            len(rows),
            query.shape[0],
            index_q[rows.start : rows.stop],
            index_k,
            index_weights[rows.start : rows.stop],
            rows.start,
            rows.stop,
        )
        for rows in _row_tiles(query.shape[0], bytes_per_row, budget_bytes)
    ]
    return torch.cat(tiles)


def _head_sum(
    query: Tensor, key: Tensor, slots: Tensor, support: Tensor, softmax_scale: float, lse: Tensor | None, gather: bool
) -> Tensor:
    """Sum over the heads of the attention probabilities on the support: [t, slots], at least fp32."""
    wide = _wide_dtype(query.dtype)
    if gather:
        scores = torch.einsum("tnd,tkd->tnk", query.to(wide), _gather_rows(key.to(wide), slots, support))
    else:
        scores = torch.einsum("tnd,sd->tns", query.to(wide), key.to(wide))
    scores = scores * softmax_scale
    if lse is None:
        probabilities, _ = _masked_softmax(scores, support[:, None, :])
    else:
        probabilities = torch.where(support[:, None, :], torch.exp(scores - lse.to(wide)[..., None]), 0.0)
    return probabilities.sum(1)


def _masked_softmax(scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and natural log-sum-exp over the last axis where `allowed`; 0 and -inf for rows that allow nothing."""
    filled = _fill_outside(scores, allowed)
    some = allowed.any(-1).expand(scores.shape[:-1])
    lse = filled.logsumexp(-1) if scores.shape[-1] else torch.zeros_like(some, dtype=scores.dtype)
    lse = torch.where(some, lse, -torch.inf)
    probabilities = torch.where(allowed, filled.softmax(-1), 0.0)
    return probabilities, lse


def _fill_outside(scores: Tensor, allowed: Tensor) -> Tensor:
    """Scores with -inf where not allowed, and 0 throughout a row that allows nothing: its softmax would be NaN."""
    filled = scores.masked_fill(~allowed, -torch.inf)
    return filled.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def _gather_rows(rows: Tensor, indices: Tensor, selected: Tensor) -> Tensor:
    """Rows [S, D] at indices [t, K] -> [t, K, D], exact zeros where nothing is selected."""
    if rows.shape[0] == 0:
        return rows.new_zeros(*indices.shape, rows.shape[1]) + 0.0 * rows.sum()
    return rows[torch.where(selected, indices, 0).long()].masked_fill(~selected[..., None], 0.0)


def _row_tiles(num_rows: int, bytes_per_row: int, budget_bytes: int) -> Iterator[range]:
    """Consecutive row ranges of at most budget_bytes each; one empty range for no rows."""
    step = max(1, budget_bytes // max(1, bytes_per_row))
    for start in range(0, max(num_rows, 1), step):
        yield range(start, min(start + step, num_rows))


def _run_tile(function: Callable, tile_rows: int, num_rows: int, *args: object):
    """Call function, keeping nothing but its inputs for the backward pass when it covers only a part of the rows."""
    if tile_rows == num_rows or not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
