"""The kernel behind in-place, out-of-place and concatenating RoPE: one flat axis of (token, head) rows.

    rope_out[row] = rotate(rope_in[row], table row of the token)      or the transposed rotation
    nope_out[row] = nope_in[row]                                      unless NOPE is 0 (in place)

Layout: every tensor is `[S, B, n, d]` or `[T, n, d]` with any strides but a last one of 1. Row r is head r % n of token
r // n, so that no head lies outside its token for any n and any block. Element offsets are 64-bit before their first
multiplication; a program divides its first row once in 64 bits and the rest in 32.
Bytes: the rotary slice read and written (2 * emb_dim * itemsize a row), the copied slice likewise, the table rows once
a token (their left halves, of tables with equal halves). All loads of a program come before a CTA barrier and all
stores after it: pairs move within the row, and threads of several warps share a row.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from .positions import NOT_SPECIALIZED, block_positions, position_arguments
from .registry import blocks, on_device_of, padded, token_count, token_strides
from .rotation import (
    columns_mask,
    load_halves,
    load_interleaved,
    load_table_row,
    rotate_pairs,
    split_interleaved,
    store_pairs,
)
from .tables import has_equal_halves


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def rope_rows_kernel(
    p_rope_in,
    p_rope_out,
    p_nope_in,
    p_nope_out,
    p_cos,
    p_sin,
    p_offsets,
    p_ids,
    n_tokens,
    batch,
    tokens_per_row,
    n_sequences,
    search_steps,
    table_rows,
    cp_rank,
    cp_size,
    cos_stride,
    sin_stride,
    rope_in_s,
    rope_in_b,
    rope_in_h,
    rope_out_s,
    rope_out_b,
    rope_out_h,
    nope_in_s,
    nope_in_b,
    nope_in_h,
    nope_out_s,
    nope_out_b,
    nope_out_h,
    ROPE_IN_AT: tl.constexpr,
    ROPE_OUT_AT: tl.constexpr,
    NOPE_IN_AT: tl.constexpr,
    NOPE_OUT_AT: tl.constexpr,
    HEADS: tl.constexpr,
    EMB: tl.constexpr,
    EMB_PADDED: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    BATCHED: tl.constexpr,
    POSITIONS: tl.constexpr,
    EQUAL_HALVES: tl.constexpr,
    READ_HALVES: tl.constexpr,
    WRITE_HALVES: tl.constexpr,
    INVERSE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_first = tl.program_id(0).to(tl.int64) * BLOCK  # first row of the program
    i_token = i_first // HEADS
    o_row = (i_first - i_token * HEADS).to(tl.int32) + tl.arange(0, BLOCK)  # [BLOCK], counted from i_token's head 0
    o_token = i_token.to(tl.int32) + o_row // HEADS
    o_head = (o_row % HEADS).to(tl.int64)
    m_row = o_token < n_tokens
    if BATCHED:
        o_s = (o_token // batch).to(tl.int64)
        o_b = (o_token % batch).to(tl.int64)
    else:
        o_s = o_token.to(tl.int64)
        o_b = tl.zeros([BLOCK], dtype=tl.int64)

    p_in = p_rope_in + o_s * rope_in_s + o_b * rope_in_b + o_head * rope_in_h + ROPE_IN_AT
    if READ_HALVES:
        first, second = load_halves(p_in, m_row, EMB, EMB_PADDED)
    else:
        b_pairs = load_interleaved(p_in, m_row, EMB, EMB_PADDED)
    if NOPE > 0:
        o_nope = tl.arange(0, NOPE_PADDED)
        m_nope = columns_mask(m_row, o_nope, NOPE, NOPE_PADDED)
        p_from = p_nope_in + o_s * nope_in_s + o_b * nope_in_b + o_head * nope_in_h + NOPE_IN_AT
        b_nope = tl.load(p_from[:, None] + o_nope[None, :], mask=m_nope, other=0.0)
    REACH: tl.constexpr = (
        BLOCK // HEADS - 1 if BLOCK % HEADS == 0 else 0 if HEADS % BLOCK == 0 else (HEADS + BLOCK - 2) // HEADS
    )
    position = block_positions(
        i_token.to(tl.int32),
        o_token,
        m_row,
        n_tokens,
        tokens_per_row,
        p_offsets,
        n_sequences,
        search_steps,
        cp_rank,
        cp_size,
        p_ids,
        POSITIONS,
        REACH,
    )
    cos_l, cos_r = load_table_row(
        p_cos, position, m_row, table_rows, cos_stride, EMB, EMB_PADDED, POSITIONS, EQUAL_HALVES
    )
    sin_l, sin_r = load_table_row(
        p_sin, position, m_row, table_rows, sin_stride, EMB, EMB_PADDED, POSITIONS, EQUAL_HALVES
    )
    if not READ_HALVES:  # only now, because splitting waits for the load
        first, second = split_interleaved(b_pairs)
    first, second = rotate_pairs(first, second, cos_l, cos_r, sin_l, sin_r, INVERSE, TRANSPOSED)

    tl.debug_barrier()  # in place, another warp may still have to read what this one writes
    p_out = p_rope_out + o_s * rope_out_s + o_b * rope_out_b + o_head * rope_out_h + ROPE_OUT_AT
    store_pairs(p_out, m_row, first, second, EMB, EMB_PADDED, WRITE_HALVES)
    if NOPE > 0:
        p_to = p_nope_out + o_s * nope_out_s + o_b * nope_out_b + o_head * nope_out_h + NOPE_OUT_AT
        tl.store(p_to[:, None] + o_nope[None, :], b_nope, mask=m_nope)


def rows_launch(emb_dim: int, nope_dim: int, heads: int) -> tuple[int, int]:
    """Rows and warps of a program, from the shape alone: the same on every rank and in every process.

    In place a thread holds 8 rotary channels (16 with one head, whose rows share no table entry); when the rest of a
    head is copied as well, a program moves about 4096 padded channels with 4 warps.
    """
    emb_padded = padded(emb_dim)
    if nope_dim:
        width = emb_padded + padded(nope_dim)
        return max(1, min(128, 2 ** round(math.log2(4096 / width)))), 4
    channels, a_thread = (1024, 16) if heads == 1 else (1024, 8) if heads >= 16 else (2048, 8)
    rows = max(1, min(128, channels // emb_padded))
    return rows, max(1, min(8, rows * emb_padded // (32 * a_thread)))


def launch_rope_rows(
    rope_in: tuple[Tensor, int],
    rope_out: tuple[Tensor, int],
    nope_in: tuple[Tensor, int] | None,
    nope_out: tuple[Tensor, int] | None,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    position_ids: Tensor | None = None,
    *,
    inverse: bool = False,
    read_halves: bool = False,
    write_halves: bool = True,
    transposed: bool = False,
    block_rows: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Launch `rope_rows_kernel` on checked arguments.

    Args:
        rope_in: tensor `[S, B, n, d]` or `[T, n, d]`, and the channel where its rotary slice starts.
        rope_out: where the rotated slice goes; may be the same.
        nope_in: tensor and channel of what is copied, or None.
        nope_out: where it goes.
        cos: cosine table with contiguous rows.
        sin: sine table likewise.
        nope_dim: channels to copy, 0 for none.
        emb_dim: channels to rotate.
        cu_seqlens: global offsets, or None.
        cp_rank: context-parallel rank.
        cp_size: context-parallel size.
        position_ids: explicit table rows, or None.
        inverse: flip the sign of sin.
        read_halves: pairs are read half-split.
        write_halves: pairs are written half-split.
        transposed: the transposed rotation.
        block_rows: rows a program, to force one; a power of two.
        num_warps: warps a program, to force them.
    """
    t = rope_in[0]
    tokens, heads = token_count(t), t.shape[-2]
    if tokens == 0:
        return
    if nope_in is None or nope_out is None or nope_dim == 0:
        nope_in, nope_out, nope_dim = rope_in, rope_out, 0
    ends = (rope_in, rope_out, nope_in, nope_out)
    strides = [token_strides(tensor) for tensor, _ in ends]
    batch = t.shape[1] if t.ndim == 4 else 1
    batched = batch > 1 and any(s != batch * b for s, b, _ in strides)
    if batch > 1 and not batched:
        strides = [(b, 0, h) for _, b, h in strides]
    positions, rule = position_arguments(t.shape[:-2], cu_seqlens, cp_rank, cp_size, position_ids)
    rows, warps = rows_launch(emb_dim, nope_dim, heads)
    rows, warps = block_rows or rows, num_warps or warps
    with on_device_of(t):
        rope_rows_kernel[(blocks(tokens * heads, rows),)](
            *(tensor for tensor, _ in ends),
            cos,
            sin,
            positions["p_offsets"],
            positions["p_ids"],
            tokens,
            batch,
            positions["tokens_per_row"],
            positions["n_sequences"],
            positions["search_steps"],
            cos.shape[0],
            positions["cp_rank"],
            positions["cp_size"],
            cos.stride(0),
            sin.stride(0),
            *(step for steps in strides for step in steps),
            *(first for _, first in ends),
            HEADS=heads,
            EMB=emb_dim,
            EMB_PADDED=padded(emb_dim),
            NOPE=nope_dim,
            NOPE_PADDED=padded(nope_dim),
            BATCHED=batched,
            POSITIONS=rule,
            EQUAL_HALVES=has_equal_halves(cos, sin),
            READ_HALVES=read_halves,
            WRITE_HALVES=write_halves,
            INVERSE=inverse,
            TRANSPOSED=transposed,
            BLOCK=rows,
            num_warps=warps,
            enable_fp_fusion=False,  # the unfused twin rounds products too
        )
