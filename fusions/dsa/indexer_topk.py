"""Top-k keys of each query row by indexer score, without the score matrix.

    selected[t] = topk_select(indexer_scores(q, k, weights)[t], topk)

Query rows are taken in tiles: scores of a tile into one reused buffer, top-k of the tile, next. The buffer holds
rows x keys fp32 within `budget_bytes` (one row at least). Without q_positions a tile ends at its last row's own key,
so early tiles have more rows. A score's bits do not depend on its tile, so neither does the selected set.

Bytes: 4*T*S written and read, about half of it when causal; FLOPs as `indexer_scores`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .indexer_scores import kernel_queries, launch_scores, unit_last_stride
from .key_ranges_kernel import launch_key_ranges
from .operator import operator
from .selection_checks import check_indexer_inputs, check_kernel_width, check_topk, require_kernel_device
from .sparse_tiles import interpreted
from .topk_pieces import CAUSAL, RANGES
from .topk_select import choose_topk_blocks, launch_topk

_ROW_MULTIPLE = 64


def row_tiles(num_rows: int, num_keys: int, *, causal: bool, budget_elements: int) -> Iterator[tuple[int, int, int]]:
    """Tiles (first row, row end, keys) of at least one row, rows * padded keys <= budget_elements.

    The keys of a causal tile end at its last row's own key.
    """
    first = 0
    while first < num_rows:
        keys = _padded(num_keys)
        rows = budget_elements // keys
        if causal and first + rows < num_keys:  # rows * (first + rows + 3) <= budget, so that padded keys fit
            rows = (math.isqrt((first + 3) ** 2 + 4 * budget_elements) - (first + 3)) // 2
        if rows > _ROW_MULTIPLE:
            rows -= rows % _ROW_MULTIPLE
        end = min(num_rows, first + max(1, rows))
        yield first, end, min(num_keys, end) if causal else num_keys
        first = end


def _padded(keys: int) -> int:
    """Row stride of a score tile: a multiple of four elements, for wide loads."""
    return (keys + 3) // 4 * 4


@operator("indexer_topk")
def _indexer_topk(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    topk: int,
    relu: bool,
    cu_seqlens: Tensor | None,
    q_positions: Tensor | None,
    budget_bytes: int,
) -> Tensor:
    rows, keys = index_q.shape[0], index_k.shape[0]
    taken = min(topk, keys)
    out = index_q.new_empty((rows, taken), dtype=torch.int64)
    if out.numel() == 0:
        return out
    index_q, index_k = kernel_queries(index_q), unit_last_stride(index_k)
    index_weights = unit_last_stride(index_weights.float())
    begin = end = None
    if cu_seqlens is not None or q_positions is not None:
        begin, end = launch_key_ranges(
            rows, keys, device=index_q.device, cu_seqlens=cu_seqlens, q_positions=q_positions
        )
    causal = q_positions is None
    tiles = list(row_tiles(rows, keys, causal=causal, budget_elements=max(1, budget_bytes // 4)))
    buffer = index_q.new_empty(
        max((stop - first) * _padded(width) for first, stop, width in tiles), dtype=torch.float32
    )
    for first, stop, width in tiles:
        tile = slice(first, stop)
        stride = _padded(width)
        scores = buffer[: (stop - first) * stride].view(stop - first, stride)[:, :width]
        range_of_tile = (None, None) if begin is None or end is None else (begin[tile], end[tile])
        launch_scores(
            index_q[tile],
            index_k[:width],
            index_weights[tile],
            scores,
            relu=relu,
            first_row=first,
            begin=range_of_tile[0],
            end=range_of_tile[1],
            fill=False,
        )
        chosen = out[tile]
        if width < taken:
            chosen.fill_(-1)
        launch_topk(
            scores,
            chosen,
            topk=min(taken, width),
            blocks=choose_topk_blocks(topk, keys),
            key_range=CAUSAL if begin is None else RANGES,
            first_row=first,
            begin=range_of_tile[0],
            end=range_of_tile[1],
        )
    return out


@_indexer_topk.register_fake
def _(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    topk: int,
    relu: bool,
    cu_seqlens: Tensor | None,
    q_positions: Tensor | None,
    budget_bytes: int,
) -> Tensor:
    return index_q.new_empty((index_q.shape[0], min(topk, index_k.shape[0])), dtype=torch.int64)


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
        index_q: fp16, bf16 or fp32 [T, Hi, Di].
        index_k: [S, Di] of index_q's dtype.
        index_weights: floating [T, Hi], used in fp32.
        topk: keys to select, >= 1.
        relu: clamp each head's product at zero.
        cu_seqlens: int32 or int64 [sequences + 1], offsets of packed sequences in the keys. Without q_positions T
            must equal S.
        q_positions: int32 or int64 [T], index of each row in the keys' order; rows with a negative one see nothing.
        budget_bytes: bound on the score tile, in bytes (one row of scores at least). The selected set does not depend
            on it.

    Returns:
        int64 [T, k_eff], k_eff = min(topk, S): indices into index_k; slots without a key hold -1 and come last. No
        gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or (under MLA_ATTENTION_VALIDATE=1) offsets or positions are
            out of range.
        RuntimeError: tensors are on the CPU and Triton does not interpret.

    Source: lightning indexer and selection of DeepSeek-V3.2 (DeepSeek-AI, 2025), eq. 1 and 2, with the tie order fixed.
    """
    check_indexer_inputs(index_q, index_k, index_weights, cu_seqlens, q_positions, budget_bytes, allow_double=False)
    check_kernel_width(index_q)
    check_topk(topk)
    require_kernel_device(index_q, "index_q", "indexer_topk", interpreted())
    with torch.no_grad():
        return _indexer_topk(index_q, index_k, index_weights, topk, relu, cu_seqlens, q_positions, budget_bytes)
