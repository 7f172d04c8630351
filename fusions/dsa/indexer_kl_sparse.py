"""The indexer's divergence on a row's selected keys: the three passes over the keys that it needs.

    sums[t, j]   = sum_h exp(softmax_scale * query[t, h] . key[slot_j] - lse[t, h])          `head_sums_on_slots`
    scores[t, j] = sum_h w[t, h] * relu(q[t, h] . k[slot_j])                                 `scores_on_slots`
    dq[t, h], dw[t, h], dk[slot_j] from d[t, j] = d kl / d scores[t, j]                      `indexer_gradient_on_slots`

Layout: slots and counts of `pack_slots`, results fp32 [T, padded K], written up to the row's count. FLOPs:
2 T K n (R + Dr), 2 T K Hi Di and 6 T K Hi Di. A program takes one token; nothing of size [T, heads, K] exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sparse_tiles import interpreted, load_tile, loop_bound, matmul, padded_width, shared_memory, store_tile
from .sum_by_key import sum_by_key

_LOG2_E = 1.4426950408889634
_UNIT = tl.constexpr(
    1024.0
)  # products with the gradient are formed in units of max |w| / 1024: half precision holds them


@dataclass(frozen=True)
class SlotBlocks:
    """How a kernel cuts its work: heads and slots a step, warps a program, blocks of keys in shared memory."""

    heads: int
    slots: int
    warps: int
    stages: int


@triton.jit
def head_sums_kernel(
    p_query,
    p_key,
    p_slots,
    p_counts,
    p_lse,
    p_sums,
    scale_log2,
    padded_slots,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    COLUMNS_RANK: tl.constexpr,
    COLUMNS_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    WIDTH: tl.constexpr = RANK + ROPE
    MASK_HEADS: tl.constexpr = HEADS % BLOCK_H != 0
    i_token = tl.program_id(0).to(tl.int64)
    o_rank = tl.arange(0, COLUMNS_RANK)
    o_rope = tl.arange(0, COLUMNS_ROPE)
    o_slot = tl.arange(0, BLOCK_N)
    count = tl.load(p_counts + i_token)
    p_row_slots = p_slots + i_token * padded_slots
    for i_block in tl.static_range(HEAD_BLOCKS):
        o_head = i_block * BLOCK_H + tl.arange(0, BLOCK_H)
        m_head = o_head < HEADS
        p_rows = p_query + ((i_token * HEADS + o_head) * WIDTH)[:, None]
        b_query = load_tile(p_rows, o_rank, m_head, RANK, MASK_HEADS, COLUMNS_RANK)  # [BLOCK_H, R]
        b_query_rope = load_tile(p_rows + RANK, o_rope, m_head, ROPE, MASK_HEADS, COLUMNS_ROPE)  # [BLOCK_H, Dr]
        b_lse = tl.load(p_lse + i_token * HEADS + o_head, mask=m_head, other=float("inf")) * 1.4426950408889634
        b_slot = tl.load(p_row_slots + o_slot)
        for start in tl.range(0, loop_bound(count, INTERPRETED), BLOCK_N, num_stages=STAGES):
            p_keys = p_key + b_slot.to(tl.int64)[:, None] * WIDTH
            b_key = load_tile(p_keys, o_rank, None, RANK, False, COLUMNS_RANK)  # [BLOCK_N, R]
            b_key_rope = load_tile(p_keys + RANK, o_rope, None, ROPE, False, COLUMNS_ROPE)  # [BLOCK_N, Dr]
            o_ahead = tl.minimum(start + BLOCK_N, padded_slots - BLOCK_N)
            b_slot = tl.load(p_row_slots + o_ahead + o_slot)
            b_score = matmul(b_query_rope, tl.trans(b_key_rope), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), INTERPRETED)
            b_score = matmul(b_query, tl.trans(b_key), b_score, INTERPRETED)
            b_sum = tl.sum(tl.exp2(b_score * scale_log2 - b_lse[:, None]), 0)  # a padded head adds exp2(-inf)
            p_sum = p_sums + i_token * padded_slots + start + o_slot
            if i_block > 0:
                b_sum += tl.load(p_sum)
            tl.store(p_sum, b_sum)
        tl.debug_barrier()  # the next head block reads what this one stored


@triton.jit
def slot_scores_kernel(
    p_q,
    p_k,
    p_weights,
    p_slots,
    p_counts,
    p_scores,
    padded_slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    RELU: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    MASK_HEADS: tl.constexpr = HEADS < BLOCK_H
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.arange(0, BLOCK_H)
    m_head = o_head < HEADS
    o_column = tl.arange(0, COLUMNS)
    o_slot = tl.arange(0, BLOCK_N)
    o_row = i_token * HEADS + o_head
    b_q = load_tile(p_q + (o_row * DIM)[:, None], o_column, m_head, DIM, MASK_HEADS, COLUMNS)  # [BLOCK_H, Di]
    b_weight = tl.load(p_weights + o_row, mask=m_head, other=0.0)
    count = tl.load(p_counts + i_token)
    p_row_slots = p_slots + i_token * padded_slots
    b_slot = tl.load(p_row_slots + o_slot)
    for start in tl.range(0, loop_bound(count, INTERPRETED), BLOCK_N, num_stages=STAGES):
        p_keys = p_k + b_slot.to(tl.int64)[:, None] * DIM
        b_k = load_tile(p_keys, o_column, None, DIM, False, COLUMNS)  # [BLOCK_N, Di]
        b_slot = tl.load(p_row_slots + tl.minimum(start + BLOCK_N, padded_slots - BLOCK_N) + o_slot)
        b_dot = matmul(b_q, tl.trans(b_k), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), INTERPRETED)
        if RELU:
            b_dot = tl.maximum(b_dot, 0.0, propagate_nan=tl.PropagateNan.ALL)
        b_score = tl.sum(b_dot * b_weight[:, None], 0)
        tl.store(p_scores + i_token * padded_slots + start + o_slot, b_score)


@triton.jit
def slot_gradient_kernel(
    p_q,
    p_k,
    p_weights,
    p_gradient,
    p_grad_kl,
    p_slots,
    p_counts,
    p_grad_q,
    p_grad_k,
    p_grad_weights,
    padded_slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    RELU: tl.constexpr,
    ATOMIC: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    MASK_HEADS: tl.constexpr = HEADS < BLOCK_H
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.arange(0, BLOCK_H)
    m_head = o_head < HEADS
    o_column = tl.arange(0, COLUMNS)
    o_slot = tl.arange(0, BLOCK_N)
    o_row = i_token * HEADS + o_head
    b_q = load_tile(p_q + (o_row * DIM)[:, None], o_column, m_head, DIM, MASK_HEADS, COLUMNS)  # [BLOCK_H, Di]
    b_weight = tl.load(p_weights + o_row, mask=m_head, other=0.0)
    unit = tl.max(tl.abs(b_weight), 0)
    unit = tl.where(unit == 0.0, 1.0, unit)
    b_weight = b_weight / unit * _UNIT
    unit = unit / _UNIT
    grad_kl = tl.load(p_grad_kl + i_token)

    b_dq = tl.zeros((BLOCK_H, COLUMNS), tl.float32)
    b_dw = tl.zeros((BLOCK_H,), tl.float32)
    count = tl.load(p_counts + i_token)
    p_row_slots = p_slots + i_token * padded_slots
    b_slot = tl.load(p_row_slots + o_slot)
    for start in tl.range(0, loop_bound(count, INTERPRETED), BLOCK_N, num_stages=STAGES):
        b_key = b_slot.to(tl.int64)
        b_k = load_tile(p_k + b_key[:, None] * DIM, o_column, None, DIM, False, COLUMNS)  # [BLOCK_N, Di]
        b_slot = tl.load(p_row_slots + tl.minimum(start + BLOCK_N, padded_slots - BLOCK_N) + o_slot)
        m_slot = start + o_slot < count
        b_d = tl.load(p_gradient + i_token * padded_slots + start + o_slot, mask=m_slot, other=0.0)
        b_dot = matmul(b_q, tl.trans(b_k), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), INTERPRETED)
        b_ds = b_weight[:, None] * b_d[None, :]
        if RELU:
            b_ds = tl.where(b_dot > 0.0, b_ds, 0.0)
            b_dot = tl.maximum(b_dot, 0.0)
        b_dw += tl.sum(b_dot * b_d[None, :], 1)
        b_ds = b_ds.to(b_k.dtype)  # [BLOCK_H, BLOCK_N]
        b_dq = matmul(b_ds, b_k, b_dq, INTERPRETED)
        b_share = matmul(tl.trans(b_ds), b_q, tl.zeros((BLOCK_N, COLUMNS), tl.float32), INTERPRETED) * (unit * grad_kl)
        m_share = m_slot[:, None] & (o_column < DIM)[None, :]
        if ATOMIC:
            tl.atomic_add(p_grad_k + b_key[:, None] * DIM + o_column[None, :], b_share, m_share, sem="relaxed")
        else:
            o_share = (i_token * padded_slots + start + o_slot) * DIM
            tl.store(p_grad_k + o_share[:, None] + o_column[None, :], b_share, mask=m_share)
    b_dq = b_dq * (unit * grad_kl)
    store_tile(p_grad_q + (o_row * DIM)[:, None], o_column, b_dq, m_head, DIM, MASK_HEADS, COLUMNS)
    tl.store(p_grad_weights + o_row, b_dw * grad_kl, mask=m_head)


def head_sum_blocks(heads: int, width: int, itemsize: int, shared_bytes: int) -> SlotBlocks:
    """Cut by rule: every head of the token in one block where shared memory holds it beside two blocks of keys."""
    if itemsize == 4:
        return SlotBlocks(16, 16, 8, 1)
    padded_heads = max(16, triton.next_power_of_2(heads))
    for block_heads, slots in ((128, 32), (64, 64), (64, 32), (32, 32), (16, 32), (16, 16)):
        if block_heads <= padded_heads and (block_heads + 2 * slots) * width * itemsize <= shared_bytes - 4096:
            return SlotBlocks(block_heads, slots, 4, 2)
    return SlotBlocks(16, 16, 4, 1)


def slot_blocks(heads: int, itemsize: int) -> SlotBlocks:
    """Cut by rule of the two indexer kernels; all index heads form one block."""
    padded_heads = max(16, triton.next_power_of_2(heads))
    if itemsize == 4:
        return SlotBlocks(padded_heads, 16, 8, 1)
    return SlotBlocks(padded_heads, 64, 4, 2)


def head_sums_on_slots(
    query: Tensor,
    key: Tensor,
    slots: Tensor,
    counts: Tensor,
    lse: Tensor,
    softmax_scale: float,
    kv_rank: int,
    *,
    blocks: SlotBlocks | None = None,
) -> Tensor:
    """Head-summed attention probabilities on the slots, fp32 [T, padded K].

    Args:
        query: [T, n, R + Dr], contiguous.
        key: [S, R + Dr], contiguous.
        slots: int32 [T, padded K] of `pack_slots`.
        counts: int32 [T] of `pack_slots`.
        lse: natural log-sum-exp fp32 [T, n] of the scores on the slots.
        softmax_scale: factor of the scores.
        kv_rank: any split of the width into two parts; it changes speed only.
        blocks: another cut than the rule's.
    """
    tokens, heads, width = query.shape
    rank, rope = padded_width(kv_rank), padded_width(width - kv_rank)
    sums = torch.empty(slots.shape, dtype=torch.float32, device=query.device)
    if tokens == 0:
        return sums
    blocks = blocks or head_sum_blocks(heads, rank + rope, query.element_size(), shared_memory(query))
    head_sums_kernel[(tokens,)](
        query,
        key,
        slots,
        counts,
        lse,
        sums,
        softmax_scale * _LOG2_E,
        slots.shape[1],
        HEADS=heads,
        RANK=kv_rank,
        ROPE=width - kv_rank,
        COLUMNS_RANK=rank,
        COLUMNS_ROPE=rope,
        BLOCK_H=blocks.heads,
        BLOCK_N=blocks.slots,
        STAGES=blocks.stages,
        INTERPRETED=interpreted(),
        num_warps=blocks.warps,
    )
    return sums


def scores_on_slots(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    slots: Tensor,
    counts: Tensor,
    *,
    relu: bool,
    blocks: SlotBlocks | None = None,
) -> Tensor:
    """Indexer scores of the selected keys, fp32 [T, padded K]; contiguous inputs, fp32 weights."""
    tokens, heads, dim = index_q.shape
    scores = torch.empty(slots.shape, dtype=torch.float32, device=index_q.device)
    if tokens == 0:
        return scores
    blocks = blocks or slot_blocks(heads, index_q.element_size())
    slot_scores_kernel[(tokens,)](
        index_q,
        index_k,
        index_weights,
        slots,
        counts,
        scores,
        slots.shape[1],
        HEADS=heads,
        DIM=dim,
        COLUMNS=padded_width(dim),
        BLOCK_H=blocks.heads,
        BLOCK_N=blocks.slots,
        STAGES=blocks.stages,
        RELU=relu,
        INTERPRETED=interpreted(),
        num_warps=blocks.warps,
    )
    return scores


def indexer_gradient_on_slots(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    gradient: Tensor,
    grad_kl: Tensor,
    slots: Tensor,
    counts: Tensor,
    *,
    relu: bool,
    ordered: bool,
    scratch_bytes: int,
    blocks: SlotBlocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the indexer's inputs from d kl / d scores on the slots.

    Args:
        index_q: [T, Hi, Di], contiguous.
        index_k: [S, Di], contiguous.
        index_weights: fp32 [T, Hi], contiguous.
        gradient: d kl / d scores fp32 [T, padded K].
        grad_kl: gradient of each row's divergence fp32 [T].
        slots: int32 [T, padded K] of `pack_slots`.
        counts: int32 [T] of `pack_slots`.
        relu: whether dot products were clipped at 0.
        ordered: add the shares of a key in a fixed order, without atomics.
        scratch_bytes: most bytes of the shares that are written out for ordered sums.
        blocks: another cut than the rule's.

    Returns:
        (dq [T, Hi, Di] in index_q's dtype, dk fp32 [S, Di], dw fp32 [T, Hi]).
    """
    tokens, heads, dim = index_q.shape
    grad_q = torch.empty_like(index_q)
    grad_k = torch.zeros(index_k.shape, dtype=torch.float32, device=index_k.device)
    grad_weights = torch.empty_like(index_weights)
    blocks = blocks or slot_blocks(heads, index_q.element_size())
    padded_slots = slots.shape[1]
    step = min(tokens, max(1, scratch_bytes // (4 * padded_slots * dim))) if ordered else tokens
    shares = torch.empty((step, 1, padded_slots, dim) if ordered else (0,), dtype=torch.float32, device=index_k.device)
    for begin in range(0, tokens, max(step, 1)):
        rows = slice(begin, min(begin + step, tokens))
        slot_gradient_kernel[(rows.stop - rows.start,)](
            index_q[rows],
            index_k,
            index_weights[rows],
            gradient[rows],
            grad_kl[rows],
            slots[rows],
            counts[rows],
            grad_q[rows],
            shares if ordered else grad_k,
            grad_weights[rows],
            padded_slots,
            HEADS=heads,
            DIM=dim,
            COLUMNS=padded_width(dim),
            BLOCK_H=blocks.heads,
            BLOCK_N=blocks.slots,
            STAGES=blocks.stages,
            RELU=relu,
            ATOMIC=not ordered,
            INTERPRETED=interpreted(),
            num_warps=blocks.warps,
        )
        if ordered:
            sum_by_key(shares[: rows.stop - rows.start], slots[rows], counts[rows], grad_k)
    return grad_q, grad_k, grad_weights
