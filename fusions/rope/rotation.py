"""Pieces of the rotation that the kernels share: reading pairs, table rows, the rotation itself, writing pairs.

A block is `[rows, padded half width]`. Widths that are not powers of two are padded and masked; for powers of two the
mask is that of the rows alone, so that the compiler sees what it would see without padding.
"""

import triton
import triton.language as tl

from .positions import BY_ROW


@triton.jit
def columns_mask(m_row, o_column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """`[rows, columns]` mask: rows alone when the width fills its block."""
    if WIDTH == PADDED:
        return m_row[:, None]
    else:
        return m_row[:, None] & (o_column < WIDTH)[None, :]


@triton.jit
def load_interleaved(p_row, m_row, EMB: tl.constexpr, PADDED: tl.constexpr):
    """Rows of interleaved pairs as they lie in memory, `[rows, PADDED]`, one contiguous vector a row; masked: 0."""
    o_emb = tl.arange(0, PADDED)
    m_emb = columns_mask(m_row, o_emb, EMB, PADDED)
    return tl.load(p_row[:, None] + o_emb[None, :], mask=m_emb, other=0.0)


@triton.jit
def split_interleaved(b_x):
    """Members of interleaved pairs, fp32 `[rows, width // 2]` each."""
    first, second = tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def load_halves(p_row, m_row, EMB: tl.constexpr, PADDED: tl.constexpr):
    """Members of half-split pairs, fp32 `[rows, PADDED // 2]` each; masked lanes are 0."""
    o_half = tl.arange(0, PADDED // 2)
    m_half = columns_mask(m_row, o_half, EMB // 2, PADDED // 2)
    p_first = p_row[:, None] + o_half[None, :]
    first = tl.load(p_first, mask=m_half, other=0.0)
    second = tl.load(p_first + EMB // 2, mask=m_half, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(p_row, m_row, first, second, EMB: tl.constexpr, PADDED: tl.constexpr, HALVES: tl.constexpr):
    """Round once to the dtype of the pointer and store; pairs in halves or interleaved."""
    HALF: tl.constexpr = EMB // 2
    HALF_PADDED: tl.constexpr = PADDED // 2
    first = first.to(p_row.dtype.element_ty)
    second = second.to(p_row.dtype.element_ty)
    if HALVES:
        o_half = tl.arange(0, HALF_PADDED)
        m_half = columns_mask(m_row, o_half, HALF, HALF_PADDED)
        p_first = p_row[:, None] + o_half[None, :]
        tl.store(p_first, first, mask=m_half)
        tl.store(p_first + HALF, second, mask=m_half)
    else:
        o_emb = tl.arange(0, PADDED)
        m_emb = columns_mask(m_row, o_emb, EMB, PADDED)
        b_x = tl.reshape(tl.join(first, second), (p_row.shape[0], PADDED))
        tl.store(p_row[:, None] + o_emb[None, :], b_x, mask=m_emb)


@triton.jit
def load_table_row(
    p_table,
    position,
    m_row,
    table_rows,
    stride,
    EMB: tl.constexpr,
    PADDED: tl.constexpr,
    POSITIONS: tl.constexpr,
    EQUAL_HALVES: tl.constexpr,
):
    """Left and right half of each row's table entry, fp32; a position outside the table gives NaN, not a stray read."""
    HALF: tl.constexpr = EMB // 2
    HALF_PADDED: tl.constexpr = PADDED // 2
    o_half = tl.arange(0, HALF_PADDED)
    p_left = p_table + position[:, None] * stride + o_half[None, :]
    if POSITIONS == BY_ROW:  # the host has compared the table's length with the sequence's
        m_table = columns_mask(m_row, o_half, HALF, HALF_PADDED)
        left = tl.load(p_left, mask=m_table, other=0.0)
        right = left
        if not EQUAL_HALVES:
            right = tl.load(p_left + HALF, mask=m_table, other=0.0)
    else:
        m_known = m_row & (position >= 0) & (position < table_rows)
        m_table = columns_mask(m_known, o_half, HALF, HALF_PADDED)
        left = tl.load(p_left, mask=m_table, other=float("nan"))
        right = left
        if not EQUAL_HALVES:
            right = tl.load(p_left + HALF, mask=m_table, other=float("nan"))
    return left.to(tl.float32), right.to(tl.float32)


@triton.jit
def rotate_pairs(first, second, cos_l, cos_r, sin_l, sin_r, INVERSE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """L = a*cL - b*sL and R = b*cR + a*sR, or transposed: a = L*cL + R*sR and b = R*cR - L*sL."""
    if INVERSE:
        sin_l = -sin_l
        sin_r = -sin_r
    if TRANSPOSED:
        return first * cos_l + second * sin_r, second * cos_r - first * sin_l
    else:
        return first * cos_l - second * sin_l, second * cos_r + first * sin_r
