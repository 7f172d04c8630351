"""`key_ranges` in one launch: the range of keys that each query row may see.

    begin(t) <= key < end(t), as key_ranges.py defines them

A program takes a block of rows and finds their sequences by bisection over the offsets.
Bytes moved: 8 or 12 a row, and log2(sequences) cached reads each. No device sync.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["n_rows", "n_keys", "n_offsets", "first_step"])
def _key_ranges_kernel(
    p_positions,  # int [T] or None: row t stands at t
    p_offsets,  # int [sequences + 1] or None
    p_begin,
    p_end,
    n_rows,
    n_keys,
    n_offsets,
    first_step,  # largest power of two below n_offsets
    BLOCK: tl.constexpr,
):
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < n_rows
    b_position = o_row.to(tl.int64)
    if p_positions is not None:
        b_position = tl.load(p_positions + o_row, mask=m_row, other=-1).to(tl.int64)
    b_begin = tl.zeros((BLOCK,), tl.int64)
    m_seen = b_position >= 0
    if p_offsets is not None:
        b_sequence = tl.zeros((BLOCK,), tl.int32)
        step = first_step
        while step > 0:
            m_inside = b_sequence + step < n_offsets
            b_offset = tl.load(p_offsets + b_sequence + step, mask=m_inside, other=0).to(tl.int64)
            b_sequence = tl.where(m_inside & (b_offset <= b_position), b_sequence + step, b_sequence)
            step = step // 2
        b_begin = tl.load(p_offsets + b_sequence).to(tl.int64)
        m_seen = m_seen & (b_position < tl.load(p_offsets + n_offsets - 1))
    b_end = tl.where(m_seen, tl.minimum(b_position + 1, n_keys), 0)
    b_begin = tl.where(m_seen, tl.minimum(b_begin, b_end), 0)
    tl.store(p_begin + o_row, b_begin.to(tl.int32), mask=m_row)
    tl.store(p_end + o_row, b_end.to(tl.int32), mask=m_row)


def launch_key_ranges(
    num_rows: int, num_keys: int, *, device: torch.device, cu_seqlens: Tensor | None, q_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Range of allowed keys of each query row: `key_ranges` with the same arguments and result."""
    begin, end = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    offsets = 0 if cu_seqlens is None else cu_seqlens.numel()
    _key_ranges_kernel[(triton.cdiv(num_rows, 1024),)](
        None if q_positions is None else q_positions.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        begin,
        end,
        num_rows,
        num_keys,
        offsets,
        triton.next_power_of_2(offsets) // 2 if offsets > 1 else 0,
        BLOCK=1024,
        num_warps=4,
    )
    return begin, end
