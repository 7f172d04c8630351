"""Kernels of the key/value split and of the shared rotary key alone.

    forward   key[t, h] = kv[t, h, :k_dim] | rotate(k_pos_emb[t])        value[t, h] = kv[t, h, k_dim:]
    backward  dkv[t, h] = dkey[t, h, :k_dim] | dvalue[t, h]
              dk_pos_emb[t] = rotate^T(sum over h of dkey[t, h, k_dim:]), summed and rotated in fp32, rounded once

Layout: `[S, B, n, d]` or `[T, n, d]` with any strides but a last one of 1. A program holds a block of tokens and a
block of their heads; heads beyond n are masked, in loads (with 0) and stores. Forward rotates once a token and stores
the result to all heads of the block. Backward gives the sum over heads to programs of their own, which hold all heads
of their tokens, so that there are no atomics and the order of the sum depends on the shape alone; they lie in the grid
beside the programs that copy the same tokens.
Bytes: forward n*(k_dim + v_dim) + emb_dim read and n*(k_dim + emb_dim + v_dim) written a token, backward the reverse.
"""

import triton
import triton.language as tl

from .positions import NOT_SPECIALIZED, block_positions
from .rotation import (
    columns_mask,
    load_interleaved,
    load_table_row,
    rotate_pairs,
    split_interleaved,
    store_pairs,
)


@triton.jit
def _token_index(o_token, batch, BATCHED: tl.constexpr):
    """Tokens -> (s, b) as 64-bit indices."""
    if BATCHED:
        return (o_token // batch).to(tl.int64), (o_token % batch).to(tl.int64)
    else:
        return o_token.to(tl.int64), (o_token * 0).to(tl.int64)


@triton.jit
def _head_rows(i_tokens, i_heads, n_tokens, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """The rows (token, head) of a block, with their mask."""
    o_row = tl.arange(0, BLOCK_T * BLOCK_H)
    o_token = i_tokens * BLOCK_T + o_row // BLOCK_H
    o_head = i_heads * BLOCK_H + o_row % BLOCK_H
    m_row = o_token < n_tokens
    if HEADS % BLOCK_H != 0:
        m_row = m_row & (o_head < HEADS)
    return o_token, o_head.to(tl.int64), m_row


@triton.jit
def _load_rows(p_row, m_row, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    o_column = tl.arange(0, PADDED)
    m_column = columns_mask(m_row, o_column, WIDTH, PADDED)
    return tl.load(p_row[:, None] + o_column[None, :], mask=m_column, other=0.0)


@triton.jit
def _store_rows(p_row, m_row, b_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    o_column = tl.arange(0, PADDED)
    m_column = columns_mask(m_row, o_column, WIDTH, PADDED)
    tl.store(p_row[:, None] + o_column[None, :], b_rows, mask=m_column)


@triton.jit
def _heads_mask(m_token, o_head, o_column, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr):
    """`[tokens, heads, columns]` mask without what is always true."""
    m_block = m_token[:, None, None]
    if HEADS % BLOCK_H != 0:
        m_block = m_block & (o_head < HEADS)[None, :, None]
    if o_column.shape[0] != WIDTH:
        m_block = m_block & (o_column < WIDTH)[None, None, :]
    return m_block


@triton.jit
def _store_to_heads(
    p_token, head_stride, m_token, o_head, b_x, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr
):
    """Store `[tokens, columns]` to every head of a block."""
    o_column = tl.arange(0, b_x.shape[1])
    m_block = _heads_mask(m_token, o_head, o_column, HEADS, BLOCK_H, WIDTH)
    p_block = p_token[:, None, None] + (o_head.to(tl.int64) * head_stride)[None, :, None] + o_column[None, None, :]
    b_block = tl.broadcast_to(b_x[:, None, :], (b_x.shape[0], BLOCK_H, b_x.shape[1]))
    tl.store(p_block, b_block.to(p_token.dtype.element_ty), mask=m_block)


@triton.jit
def _sum_of_heads(
    p_lane,
    o_lane,
    m_lane,
    head_stride,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EMB: tl.constexpr,
    PADDED: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Members of the pairs of the fp32 sum over all heads, `[tokens, PADDED // 2]` each.

    Row (token, lane) adds heads lane, lane + LANES, .., AT_ONCE of them a step; then the lanes of a token are added.
    """
    o_half = tl.arange(0, PADDED // 2)
    m_half = columns_mask(m_lane, o_half, EMB // 2, PADDED // 2)
    TO_SECOND: tl.constexpr = EMB // 2 if HALVES else 1
    p_first = p_lane[:, None] + (o_half if HALVES else o_half * 2)[None, :]
    first = tl.zeros([p_lane.shape[0], PADDED // 2], dtype=tl.float32)
    second = tl.zeros([p_lane.shape[0], PADDED // 2], dtype=tl.float32)
    for i_head in range(0, HEADS, LANES * AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            o_head = i_head + j * LANES + o_lane
            m_head = m_half
            if HEADS % (LANES * AT_ONCE) != 0:
                m_head = m_half & (o_head < HEADS)[:, None]
            p_head = p_first + (o_head * head_stride)[:, None]  # o_lane is 64-bit
            first += tl.load(p_head, mask=m_head, other=0.0).to(tl.float32)
            second += tl.load(p_head + TO_SECOND, mask=m_head, other=0.0).to(tl.float32)
    SHAPE: tl.constexpr = (p_lane.shape[0] // LANES, LANES, PADDED // 2)
    return tl.sum(tl.reshape(first, SHAPE), axis=1), tl.sum(tl.reshape(second, SHAPE), axis=1)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_value_kernel(
    p_kv,
    p_pos,
    p_key,
    p_value,
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
    kv_s,
    kv_b,
    kv_h,
    pos_s,
    pos_b,
    key_s,
    key_b,
    key_h,
    value_s,
    value_b,
    value_h,
    HEADS: tl.constexpr,
    EMB: tl.constexpr,
    EMB_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    COPY: tl.constexpr,
    BATCHED: tl.constexpr,
    POSITIONS: tl.constexpr,
    EQUAL_HALVES: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    BLOCKS_H: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    i_tokens = tl.program_id(0) // BLOCKS_H
    i_heads = tl.program_id(0) % BLOCKS_H
    o_token = i_tokens * BLOCK_T + tl.arange(0, BLOCK_T)
    m_token = o_token < n_tokens
    o_s, o_b = _token_index(o_token, batch, BATCHED)
    b_pairs = load_interleaved(p_pos + o_s * pos_s + o_b * pos_b, m_token, EMB, EMB_PADDED)
    if COPY:
        o_row_token, o_row_head, m_row = _head_rows(i_tokens, i_heads, n_tokens, HEADS, BLOCK_T, BLOCK_H)
        o_row_s, o_row_b = _token_index(o_row_token, batch, BATCHED)
        p_kv_row = p_kv + o_row_s * kv_s + o_row_b * kv_b + o_row_head * kv_h
        p_key_row = p_key + o_row_s * key_s + o_row_b * key_b + o_row_head * key_h
        p_value_row = p_value + o_row_s * value_s + o_row_b * value_b + o_row_head * value_h
        if K > 0:
            b_key = _load_rows(p_kv_row, m_row, K, K_PADDED)
        if V > 0:
            b_value = _load_rows(p_kv_row + K, m_row, V, V_PADDED)
    position = block_positions(
        i_tokens * BLOCK_T,
        o_token,
        m_token,
        n_tokens,
        tokens_per_row,
        p_offsets,
        n_sequences,
        search_steps,
        cp_rank,
        cp_size,
        p_ids,
        POSITIONS,
        BLOCK_T - 1,
    )
    cos_l, cos_r = load_table_row(
        p_cos, position, m_token, table_rows, cos_stride, EMB, EMB_PADDED, POSITIONS, EQUAL_HALVES
    )
    sin_l, sin_r = load_table_row(
        p_sin, position, m_token, table_rows, sin_stride, EMB, EMB_PADDED, POSITIONS, EQUAL_HALVES
    )
    if COPY:  # all loads are on their way by now
        if K > 0:
            _store_rows(p_key_row, m_row, b_key, K, K_PADDED)
        if V > 0:
            _store_rows(p_value_row, m_row, b_value, V, V_PADDED)
    first, second = split_interleaved(b_pairs)
    first, second = rotate_pairs(first, second, cos_l, cos_r, sin_l, sin_r, False, False)
    o_head = i_heads * BLOCK_H + tl.arange(0, BLOCK_H)
    p_token = p_key + o_s * key_s + o_b * key_b + K
    if HALVES:
        _store_to_heads(p_token, key_h, m_token, o_head, first, HEADS, BLOCK_H, EMB // 2)
        _store_to_heads(p_token + EMB // 2, key_h, m_token, o_head, second, HEADS, BLOCK_H, EMB // 2)
    else:
        b_both = tl.reshape(tl.join(first, second), (BLOCK_T, EMB_PADDED))
        _store_to_heads(p_token, key_h, m_token, o_head, b_both, HEADS, BLOCK_H, EMB)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_value_backward_kernel(
    p_dkv,
    p_dpos,
    p_dkey,
    p_dvalue,
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
    dkv_s,
    dkv_b,
    dkv_h,
    dpos_s,
    dpos_b,
    dkey_s,
    dkey_b,
    dkey_h,
    dvalue_s,
    dvalue_b,
    dvalue_h,
    HEADS: tl.constexpr,
    EMB: tl.constexpr,
    EMB_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    COPY: tl.constexpr,
    BATCHED: tl.constexpr,
    POSITIONS: tl.constexpr,
    EQUAL_HALVES: tl.constexpr,
    HALVES: tl.constexpr,
    GROUP_T: tl.constexpr,
    SUM_T: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    BLOCKS_H: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    SUMS: tl.constexpr = GROUP_T // SUM_T  # programs of a group of tokens
    COPIES: tl.constexpr = GROUP_T // BLOCK_T * BLOCKS_H if COPY else 0
    i_group = tl.program_id(0) // (SUMS + COPIES)
    i_part = tl.program_id(0) % (SUMS + COPIES)
    if i_part < SUMS:  # the sum over heads
        i_sum = i_group * SUMS + i_part
        o_token = i_sum * SUM_T + tl.arange(0, SUM_T)
        m_token = o_token < n_tokens
        o_s, o_b = _token_index(o_token, batch, BATCHED)
        o_lane_token, o_lane, m_lane = _head_rows(i_sum, 0, n_tokens, LANES, SUM_T, LANES)
        o_lane_s, o_lane_b = _token_index(o_lane_token, batch, BATCHED)
        p_lane = p_dkey + o_lane_s * dkey_s + o_lane_b * dkey_b + K
        position = block_positions(
            i_sum * SUM_T,
            o_token,
            m_token,
            n_tokens,
            tokens_per_row,
            p_offsets,
            n_sequences,
            search_steps,
            cp_rank,
            cp_size,
            p_ids,
            POSITIONS,
            SUM_T - 1,
        )
        cos_l, cos_r = load_table_row(
            p_cos, position, m_token, table_rows, cos_stride, EMB, EMB_PADDED, POSITIONS, EQUAL_HALVES
        )
        sin_l, sin_r = load_table_row(
            p_sin, position, m_token, table_rows, sin_stride, EMB, EMB_PADDED, POSITIONS, EQUAL_HALVES
        )
        first, second = _sum_of_heads(p_lane, o_lane, m_lane, dkey_h, HEADS, LANES, AT_ONCE, EMB, EMB_PADDED, HALVES)
        first, second = rotate_pairs(first, second, cos_l, cos_r, sin_l, sin_r, False, True)
        store_pairs(p_dpos + o_s * dpos_s + o_b * dpos_b, m_token, first, second, EMB, EMB_PADDED, False)
    elif COPY:
        i_tokens = i_group * (GROUP_T // BLOCK_T) + (i_part - SUMS) // BLOCKS_H
        i_heads = (i_part - SUMS) % BLOCKS_H
        o_row_token, o_row_head, m_row = _head_rows(i_tokens, i_heads, n_tokens, HEADS, BLOCK_T, BLOCK_H)
        o_row_s, o_row_b = _token_index(o_row_token, batch, BATCHED)
        p_dkv_row = p_dkv + o_row_s * dkv_s + o_row_b * dkv_b + o_row_head * dkv_h
        p_dkey_row = p_dkey + o_row_s * dkey_s + o_row_b * dkey_b + o_row_head * dkey_h
        p_dvalue_row = p_dvalue + o_row_s * dvalue_s + o_row_b * dvalue_b + o_row_head * dvalue_h
        if K > 0:
            b_key = _load_rows(p_dkey_row, m_row, K, K_PADDED)
        if V > 0:
            b_value = _load_rows(p_dvalue_row, m_row, V, V_PADDED)
        if K > 0:
            _store_rows(p_dkv_row, m_row, b_key, K, K_PADDED)
        if V > 0:
            _store_rows(p_dkv_row + K, m_row, b_value, V, V_PADDED)
