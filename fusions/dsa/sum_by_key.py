"""Add rows to the keys they belong to, in a fixed order and without atomics.

    sums[s] += sum over (t, b, j) with slots[t, j] == s, in ascending (t, b, j), of shares[t, b, j]

The slots of a chunk of tokens are sorted by key (stable), which gives each key the list of its rows; a program owns a
few keys, so it alone reads and writes their sums. Bytes moved: the shares once, and 8 bytes a row for the sorted list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sparse_tiles import interpreted, loop_bound

_KEYS = 8
_ROWS = 16
_COLUMNS = 128


@triton.jit(do_not_specialize=["num_keys"])
def _sum_by_key_kernel(
    p_shares,
    p_order,
    p_offsets,
    p_sums,
    num_keys,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    i_program = tl.program_id(0)
    o_column = (i_program % COLUMN_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    m_column = o_column < WIDTH
    first_key = (i_program // COLUMN_BLOCKS) * KEYS
    last_key = tl.minimum(first_key + KEYS, num_keys)
    for i_key in tl.range(loop_bound(first_key, INTERPRETED), loop_bound(last_key, INTERPRETED)):
        begin = tl.load(p_offsets + i_key)
        end = tl.load(p_offsets + i_key + 1)
        if begin < end:
            b_sum = tl.zeros((COLUMNS,), tl.float32)
            for start in tl.range(loop_bound(begin, INTERPRETED), loop_bound(end, INTERPRETED), ROWS):
                o_row = start + tl.arange(0, ROWS)
                b_row = tl.load(p_order + o_row, mask=o_row < end, other=0)
                m_share = (o_row < end)[:, None] & m_column[None, :]
                p_share = p_shares + b_row.to(tl.int64)[:, None] * WIDTH + o_column[None, :]
                b_sum += tl.sum(tl.load(p_share, mask=m_share, other=0.0), 0)
            p_sum = p_sums + tl.cast(i_key, tl.int64) * WIDTH + o_column
            tl.store(p_sum, tl.load(p_sum, mask=m_column, other=0.0) + b_sum, mask=m_column)


def sum_by_key(shares: Tensor, slots: Tensor, counts: Tensor, sums: Tensor) -> None:
    """Add every row of shares to its key's row of sums.

    Args:
        shares: fp32 [T, B, padded K, D], one row a token, block and slot; rows of unused slots are not read.
        slots: int32 [T, padded K] of `pack_slots`.
        counts: int32 [T] of `pack_slots`.
        sums: fp32 [S, D], changed in place.
    """
    num_keys, width = sums.shape
    if shares.numel() == 0 or num_keys == 0:
        return
    used = torch.arange(slots.shape[1], device=slots.device) < counts[:, None]
    keys = torch.where(used, slots, num_keys)[:, None].expand(shares.shape[:3])
    ordered, order = keys.flatten().sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(num_keys + 1, dtype=ordered.dtype, device=ordered.device))
    _sum_by_key_kernel[(triton.cdiv(num_keys, _KEYS) * triton.cdiv(width, _COLUMNS),)](
        shares,
        order,
        offsets,
        sums,
        num_keys,
        WIDTH=width,
        KEYS=_KEYS,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        INTERPRETED=interpreted(),
        num_warps=4,
    )
