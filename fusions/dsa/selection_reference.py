"""Unfused twins of the indexer's selection in plain torch: scores, exact top-k, and both in tiles of query rows.

    I[t, s]     = sum_h weights[t, h] * relu(q[t, h, :] . k[s, :])     at least fp32; -inf where row t may not see key s
    selected[t] = the first k keys in the order (I descending, index ascending), written in ascending order

fp64 inputs are computed in fp64, everything else in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .key_ranges import key_ranges
from .selection_checks import check_indexer_inputs, check_scores, check_topk

_TOPK_TILE_ELEMENTS = 2**24


def _score_tile(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, begin: Tensor, end: Tensor, relu: bool
) -> Tensor:
    """Scores [t, S] of t rows; [t, Hi, S] is its largest temporary."""
    logits = torch.einsum("thd,sd->ths", index_q, index_k)
    if relu:
        logits = logits.relu()
    scores = torch.einsum("ths,th->ts", logits, index_weights)
    key = torch.arange(index_k.shape[0], device=index_k.device)
    allowed = (key >= begin[:, None]) & (key < end[:, None])
    return scores.masked_fill(~allowed, float("-inf"))


def _rows_per_tile(index_q: Tensor, keys: int, itemsize: int, budget_bytes: int) -> int:
    return max(1, budget_bytes // max(1, index_q.shape[1] * keys * itemsize))


def indexer_scores(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    *,
    relu: bool = True,
    cu_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
    budget_bytes: int = 2**30,
) -> Tensor:
    """Scores of every query row against every key, -inf where the row may not see the key. Differentiable.

        I[t, s] = sum_h weights[t, h] * relu(q[t, h, :] . k[s, :])    for start(p) <= s <= p, p = q_positions[t] or t

    start(p) is the first key of p's sequence: 0 without cu_seqlens. A row whose position is negative, or lies past
    the last offset of cu_seqlens, sees nothing. Query rows are tiled and recomputed in backward, so that no [T, Hi,
    S] tensor exists.

    Args:
        index_q: floating [T, Hi, Di].
        index_k: [S, Di] of index_q's dtype.
        index_weights: floating [T, Hi]; any scale factors are in it.
        relu: clamp each head's product at zero.
        cu_seqlens: int32 or int64 [sequences + 1], offsets of packed sequences in the keys. Without q_positions T
            must equal S.
        q_positions: int32 or int64 [T], index of each row in the keys' order (chunks, context parallelism).
        budget_bytes: bound on the [rows, Hi, S] temporary of a tile, in bytes (one row at least).

    Returns:
        fp32 [T, S]; fp64 when an input is fp64.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or (under MLA_ATTENTION_VALIDATE=1) offsets or positions are
            out of range.

    Source: lightning indexer of DeepSeek-V3.2 (DeepSeek-AI, 2025), eq. 1.
    """
    check_indexer_inputs(index_q, index_k, index_weights, cu_seqlens, q_positions, budget_bytes, allow_double=True)
    return _scores(index_q, index_k, index_weights, relu, cu_seqlens, q_positions, budget_bytes)


def _scores(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    relu: bool,
    cu_seqlens: Tensor | None,
    q_positions: Tensor | None,
    budget_bytes: int,
) -> Tensor:
    inputs = (index_q, index_k, index_weights)
    double = any(tensor.dtype == torch.float64 for tensor in inputs)
    index_q, index_k, index_weights = (t.to(torch.float64 if double else torch.float32) for t in inputs)
    rows, keys = index_q.shape[0], index_k.shape[0]
    begin, end = key_ranges(rows, keys, device=index_q.device, cu_seqlens=cu_seqlens, q_positions=q_positions)
    step = _rows_per_tile(index_q, keys, index_q.element_size(), budget_bytes)
    if rows <= step:
        return _score_tile(index_q, index_k, index_weights, begin, end, relu)
    tiles = []
    for first in range(0, rows, step):
        tile = slice(first, first + step)
        arguments = (index_q[tile], index_k, index_weights[tile], begin[tile], end[tile], relu)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (index_q, index_k, index_weights)):
            tiles.append(checkpoint(_score_tile, *arguments, use_reentrant=False))
        else:
            tiles.append(_score_tile(*arguments))
    return torch.cat(tiles)


def _order_key(scores: Tensor) -> Tensor:
    """Integers that order like the scores: -0.0 as 0.0, NaN below every number, -inf below that."""
    integer, bits = (torch.int64, 64) if scores.dtype == torch.float64 else (torch.int32, 32)
    pattern = torch.where(scores == 0, 0.0, scores).view(integer)
    lowest, magnitude = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    key = torch.where(pattern < 0, pattern ^ magnitude, pattern)
    key = torch.where(scores.isnan(), lowest + 1, key)
    return torch.where(scores == float("-inf"), lowest, key)


def _select_tile(scores: Tensor, taken: int) -> Tensor:
    keys = scores.shape[1]
    ordered, index = torch.sort(_order_key(scores), dim=-1, descending=True, stable=True)
    is_key = ordered[:, :taken] != torch.iinfo(ordered.dtype).min
    index = torch.where(is_key, index[:, :taken], keys).sort(dim=-1).values  # unused slots last
    return torch.where(index == keys, -1, index)


def topk_select(scores: Tensor, topk: int) -> Tensor:
    """Indices of the `topk` largest scores of each row, ascending, ties to the lower index.

        selected[t] = the min(topk, number of keys) first keys of row t in the order (score descending, index ascending)

    -0.0 equals 0.0; NaN ranks below every number, so it is taken only where a row has fewer than `topk` numbers; -inf
    marks a key that is not allowed and is never taken.

    Args:
        scores: fp32 or fp64 [T, S].
        topk: number of keys to select, >= 1.

    Returns:
        int64 [T, k_eff], k_eff = min(topk, S); slots without a key hold -1 and come last.

    Raises:
        ValueError: scores is no fp32 or fp64 matrix, or topk no positive integer.

    Source: the selection step of DeepSeek-V3.2's lightning indexer (DeepSeek-AI, 2025), with the tie order fixed.
    """
    check_scores(scores, allow_double=True)
    check_topk(topk)
    scores = scores.detach()
    rows, keys = scores.shape
    taken = min(topk, keys)
    step = max(1, _TOPK_TILE_ELEMENTS // max(1, keys))
    out = torch.empty((rows, taken), dtype=torch.int64, device=scores.device)
    for first in range(0, rows, step):
        out[first : first + step] = _select_tile(scores[first : first + step], taken)
    return out


@torch.no_grad()
def indexer_topk(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    topk: int,
    *,
    relu: bool = True,
    cu_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
    budget_bytes: int = 2**30,
) -> Tensor:
    """Indices of the `topk` keys that score highest for each query row, ascending, ties to the lower index.

        selected[t] = topk_select(indexer_scores(index_q, index_k, index_weights, ...)[t], topk)

    Args:
        index_q: floating [T, Hi, Di].
        index_k: [S, Di] of index_q's dtype.
        index_weights: floating [T, Hi].
        topk: keys to select, >= 1.
        relu: clamp each head's product at zero.
        cu_seqlens: int32 or int64 [sequences + 1], offsets of packed sequences in the keys. Without q_positions T
            must equal S.
        q_positions: int32 or int64 [T], index of each row in the keys' order; rows with a negative one see nothing.
        budget_bytes: bound on the [rows, Hi, S] temporary of a tile, in bytes (one row at least).

    Returns:
        int64 [T, k_eff], k_eff = min(topk, S): indices into index_k; slots without a key hold -1 and come last. No
        gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or (under MLA_ATTENTION_VALIDATE=1) offsets or positions are
            out of range.

    Source: lightning indexer and selection of DeepSeek-V3.2 (DeepSeek-AI, 2025), eq. 1 and 2, with the tie order fixed.
    """
    check_indexer_inputs(index_q, index_k, index_weights, cu_seqlens, q_positions, budget_bytes, allow_double=True)
    check_topk(topk)
    double = any(tensor.dtype == torch.float64 for tensor in (index_q, index_k, index_weights))
    index_q, index_k, index_weights = (
        tensor.to(torch.float64 if double else torch.float32) for tensor in (index_q, index_k, index_weights)
    )
    rows, keys = index_q.shape[0], index_k.shape[0]
    begin, end = key_ranges(rows, keys, device=index_q.device, cu_seqlens=cu_seqlens, q_positions=q_positions)
    step = _rows_per_tile(index_q, keys, index_q.element_size(), budget_bytes)
    out = torch.empty((rows, min(topk, keys)), dtype=torch.int64, device=index_q.device)
    for first in range(0, rows, step):
        tile = slice(first, first + step)
        scores = _score_tile(index_q[tile], index_k, index_weights[tile], begin[tile], end[tile], relu)
        out[tile] = topk_select(scores, topk)
    return out
