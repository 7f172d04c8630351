"""Sparse MLA backward: gradients of query and key from saved lse, without saved probabilities.

    p[h, j]   = exp(x[h, j] - lse[h])                                     x as in the forward
    ds[h, j]  = p[h, j] * (dout[h] . key[slot_j, :R] - delta[h]) * softmax_scale
    delta[h]  = out[h] . dout[h] - dlse[h]
    dquery[h] = sum_j ds[h, j] * key[slot_j]
    dkey[slot_j] += sum_h ds[h, j] * query[h]  +  p[h, j] * dout[h]  (the latter on the R latent channels)

A token's keys are its own, so its share of dkey has to be added up between tokens: 4 * (R + Dr) bytes a token and key,
fp32, the larger part of the cost. Four cuts of the work:

    joint      one kernel keeps dquery in registers and leaves p and ds in a scratch buffer; a second one turns them
               into shares of dkey, a few channels a program, so that several programs share a multiprocessor and
               the additions overlap with products. p and ds are computed once.
    separate   as joint, with dquery in a third kernel that gathers the keys again and reads ds: fewer registers each.
    one_pass   everything in one kernel, no scratch; its head block is small, so shares of dkey are added more often.
    hopper     as joint, with the first kernel of sparse_mla_hopper.py.

The shares are added with fp32 atomics, or, in a fixed order, written out and summed key by key (`sum_by_key`), which is
what deterministic mode takes. Tokens are walked in chunks, so that the scratch stays within SCRATCH_BYTES.

FLOPs counted: 2 * T * n * K * (3 (R + Dr) + 2 R). Layouts as in the forward; dkey fp32 [S, R + Dr].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sparse_tiles import interpreted, load_tile, loop_bound, matmul, multiprocessors, padded_width, store_tile
from .sum_by_key import sum_by_key

SCRATCH_BYTES = 2**30
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class BackwardBlocks:
    """How the backward kernels cut their work.

    Attributes:
        variant: "joint", "separate", "one_pass" or "hopper".
        heads: heads a program of the score kernel.
        keys: slots a step of the score kernel.
        warps: warps of the score kernel.
        stages: blocks of keys the score kernel has in shared memory.
        query_keys: slots a step of the separate dquery kernel.
        query_stages: blocks of keys the separate dquery kernel has in shared memory.
        share_keys: slots a step of the dkey kernel.
        share_channels: channels a program of the dkey kernel.
        share_warps: warps of the dkey kernel.
        share_stages: blocks of p and ds the dkey kernel has in shared memory.
    """

    variant: str
    heads: int
    keys: int
    warps: int
    stages: int
    query_keys: int = 64
    query_stages: int = 2
    share_keys: int = 64
    share_channels: int = 128
    share_warps: int = 4
    share_stages: int = 2


_CUTS = (
    BackwardBlocks("separate", 64, 64, 8, 1),
    BackwardBlocks("separate", 64, 32, 8, 2),
    BackwardBlocks("joint", 32, 32, 8, 2),
    BackwardBlocks("joint", 16, 32, 4, 2),
    BackwardBlocks("joint", 16, 16, 4, 1),
)


@triton.jit
def score_gradient_kernel(
    p_query,
    p_key,
    p_slots,
    p_counts,
    p_out,
    p_grad_out,
    p_lse,
    p_grad_lse,
    p_grad_query,
    p_grad_key,
    p_p,
    p_ds,
    scale,
    padded_slots,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    COLUMNS_RANK: tl.constexpr,
    COLUMNS_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WRITTEN: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    SUM_QUERY: tl.constexpr,
    KEEP: tl.constexpr,
    ADD_KEYS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    WIDTH: tl.constexpr = RANK + ROPE
    MASK_HEADS: tl.constexpr = HEADS % BLOCK_H != 0
    i_program = tl.program_id(0)
    i_token = (i_program // HEAD_BLOCKS).to(tl.int64)
    o_head = (i_program % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = o_head < HEADS
    o_rank = tl.arange(0, COLUMNS_RANK)
    o_rope = tl.arange(0, COLUMNS_ROPE)
    o_slot = tl.arange(0, BLOCK_N)
    o_row = i_token * HEADS + o_head  # [BLOCK_H]

    p_out_rows = p_out + (o_row * RANK)[:, None]
    p_grad_rows = p_grad_out + (o_row * RANK)[:, None]
    b_grad = load_tile(p_grad_rows, o_rank, m_head, RANK, MASK_HEADS, COLUMNS_RANK)  # [BLOCK_H, R]
    b_out = load_tile(p_out_rows, o_rank, m_head, RANK, MASK_HEADS, COLUMNS_RANK)
    b_delta = tl.sum(b_out.to(tl.float32) * b_grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        b_delta -= tl.load(p_grad_lse + o_row, mask=m_head, other=0.0)
    b_lse = tl.load(p_lse + o_row, mask=m_head, other=0.0) * _LOG2_E
    p_query_rows = p_query + (o_row * WIDTH)[:, None]
    b_query = load_tile(p_query_rows, o_rank, m_head, RANK, MASK_HEADS, COLUMNS_RANK)  # [BLOCK_H, R]
    b_query_rope = load_tile(p_query_rows + RANK, o_rope, m_head, ROPE, MASK_HEADS, COLUMNS_ROPE)  # [BLOCK_H, Dr]

    b_dq = tl.zeros((BLOCK_H, COLUMNS_RANK), tl.float32)
    b_dq_rope = tl.zeros((BLOCK_H, COLUMNS_ROPE), tl.float32)
    count = tl.load(p_counts + i_token)
    p_row_slots = p_slots + i_token * padded_slots
    b_slot = tl.load(p_row_slots + o_slot)
    last = tl.cdiv(count, WRITTEN) * WRITTEN  # whole blocks of every kernel that reads p and ds: zeros past the count
    for start in tl.range(0, loop_bound(last, INTERPRETED), BLOCK_N, num_stages=STAGES):
        o_key = b_slot.to(tl.int64)[:, None] * WIDTH
        b_key = load_tile(p_key + o_key, o_rank, None, RANK, False, COLUMNS_RANK)  # [BLOCK_N, R]
        b_key_rope = load_tile(p_key + RANK + o_key, o_rope, None, ROPE, False, COLUMNS_ROPE)  # [BLOCK_N, Dr]
        b_slot = tl.load(p_row_slots + tl.minimum(start + BLOCK_N, padded_slots - BLOCK_N) + o_slot)  # read ahead
        b_score = matmul(b_query_rope, tl.trans(b_key_rope), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), INTERPRETED)
        b_score = matmul(b_query, tl.trans(b_key), b_score, INTERPRETED)
        b_dp = matmul(b_grad, tl.trans(b_key), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), INTERPRETED)
        m_slot = start + o_slot < count
        b_p = tl.where(m_slot[None, :], tl.exp2(b_score * (scale * _LOG2_E) - b_lse[:, None]), 0.0)
        b_ds = (b_p * (b_dp - b_delta[:, None]) * scale).to(b_key.dtype)  # [BLOCK_H, BLOCK_N]
        b_p = b_p.to(b_key.dtype)
        if SUM_QUERY:
            b_dq = matmul(b_ds, b_key, b_dq, INTERPRETED)
            b_dq_rope = matmul(b_ds, b_key_rope, b_dq_rope, INTERPRETED)
        if KEEP:
            o_kept = (o_row * padded_slots)[:, None] + start
            store_tile(p_p + o_kept, o_slot, b_p, m_head, BLOCK_N, MASK_HEADS, BLOCK_N)
            store_tile(p_ds + o_kept, o_slot, b_ds, m_head, BLOCK_N, MASK_HEADS, BLOCK_N)
        if ADD_KEYS:
            b_dk = matmul(tl.trans(b_ds), b_query, tl.zeros((BLOCK_N, COLUMNS_RANK), tl.float32), INTERPRETED)
            b_dk = matmul(tl.trans(b_p), b_grad, b_dk, INTERPRETED)
            b_dk_rope = matmul(tl.trans(b_ds), b_query_rope, tl.zeros((BLOCK_N, COLUMNS_ROPE), tl.float32), INTERPRETED)
            p_dk = p_grad_key + o_key
            tl.atomic_add(p_dk + o_rank[None, :], b_dk, m_slot[:, None] & (o_rank < RANK)[None, :], sem="relaxed")
            p_dk += RANK
            tl.atomic_add(p_dk + o_rope[None, :], b_dk_rope, m_slot[:, None] & (o_rope < ROPE)[None, :], sem="relaxed")
    if SUM_QUERY:
        p_dq_rows = p_grad_query + (o_row * WIDTH)[:, None]
        store_tile(p_dq_rows, o_rank, b_dq, m_head, RANK, MASK_HEADS, COLUMNS_RANK)
        store_tile(p_dq_rows + RANK, o_rope, b_dq_rope, m_head, ROPE, MASK_HEADS, COLUMNS_ROPE)


@triton.jit
def query_gradient_kernel(
    p_key,
    p_slots,
    p_counts,
    p_ds,
    p_grad_query,
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
    i_program = tl.program_id(0)
    i_token = (i_program // HEAD_BLOCKS).to(tl.int64)
    o_head = (i_program % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = o_head < HEADS
    o_rank = tl.arange(0, COLUMNS_RANK)
    o_rope = tl.arange(0, COLUMNS_ROPE)
    o_slot = tl.arange(0, BLOCK_N)
    o_row = i_token * HEADS + o_head  # [BLOCK_H]

    b_dq = tl.zeros((BLOCK_H, COLUMNS_RANK), tl.float32)
    b_dq_rope = tl.zeros((BLOCK_H, COLUMNS_ROPE), tl.float32)
    count = tl.load(p_counts + i_token)
    p_row_slots = p_slots + i_token * padded_slots
    p_ds_rows = p_ds + (o_row * padded_slots)[:, None]
    b_slot = tl.load(p_row_slots + o_slot)
    for start in tl.range(0, loop_bound(count, INTERPRETED), BLOCK_N, num_stages=STAGES):
        o_key = b_slot.to(tl.int64)[:, None] * WIDTH
        b_ds = load_tile(p_ds_rows + start, o_slot, m_head, BLOCK_N, MASK_HEADS, BLOCK_N)  # [BLOCK_H, BLOCK_N]
        b_key = load_tile(p_key + o_key, o_rank, None, RANK, False, COLUMNS_RANK)  # [BLOCK_N, R]
        b_key_rope = load_tile(p_key + RANK + o_key, o_rope, None, ROPE, False, COLUMNS_ROPE)  # [BLOCK_N, Dr]
        b_slot = tl.load(p_row_slots + tl.minimum(start + BLOCK_N, padded_slots - BLOCK_N) + o_slot)  # read ahead
        b_dq = matmul(b_ds, b_key, b_dq, INTERPRETED)
        b_dq_rope = matmul(b_ds, b_key_rope, b_dq_rope, INTERPRETED)
    p_dq_rows = p_grad_query + (o_row * WIDTH)[:, None]
    store_tile(p_dq_rows, o_rank, b_dq, m_head, RANK, MASK_HEADS, COLUMNS_RANK)
    store_tile(p_dq_rows + RANK, o_rope, b_dq_rope, m_head, ROPE, MASK_HEADS, COLUMNS_ROPE)


@triton.jit
def key_share_kernel(
    p_query,
    p_grad_out,
    p_slots,
    p_counts,
    p_p,
    p_ds,
    p_grad_key,
    padded_slots,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    ATOMIC: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    CHUNKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    WIDTH: tl.constexpr = RANK + ROPE
    MASK_HEADS: tl.constexpr = HEADS % BLOCK_H != 0
    i_program = tl.program_id(0)
    i_share = i_program // CHUNKS  # token and head block
    i_token = (i_share // HEAD_BLOCKS).to(tl.int64)
    o_channel = (i_program % CHUNKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    o_head = (i_share % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = o_head < HEADS
    o_slot = tl.arange(0, BLOCK_N)
    o_row = i_token * HEADS + o_head  # [BLOCK_H]

    p_query_rows = p_query + (o_row * WIDTH + FIRST)[:, None]
    b_query = load_tile(p_query_rows, o_channel, m_head, CHANNELS, MASK_HEADS, CHUNKS * BLOCK_C)  # [BLOCK_H, BLOCK_C]
    if HAS_VALUE:
        p_grad_rows = p_grad_out + (o_row * RANK)[:, None]
        b_grad = load_tile(p_grad_rows, o_channel, m_head, CHANNELS, MASK_HEADS, CHUNKS * BLOCK_C)
    count = tl.load(p_counts + i_token)
    o_kept = (o_row * padded_slots)[:, None]
    for start in tl.range(0, loop_bound(count, INTERPRETED), BLOCK_N, num_stages=STAGES):
        b_ds = load_tile(p_ds + o_kept + start, o_slot, m_head, BLOCK_N, MASK_HEADS, BLOCK_N)  # [BLOCK_H, BLOCK_N]
        b_share = matmul(tl.trans(b_ds), b_query, tl.zeros((BLOCK_N, BLOCK_C), tl.float32), INTERPRETED)
        if HAS_VALUE:
            b_p = load_tile(p_p + o_kept + start, o_slot, m_head, BLOCK_N, MASK_HEADS, BLOCK_N)
            b_share = matmul(tl.trans(b_p), b_grad, b_share, INTERPRETED)
        m_share = (start + o_slot < count)[:, None] & (o_channel < CHANNELS)[None, :]
        if ATOMIC:
            b_slot = tl.load(p_slots + i_token * padded_slots + start + o_slot)
            p_share = p_grad_key + (b_slot.to(tl.int64) * WIDTH + FIRST)[:, None] + o_channel[None, :]
            tl.atomic_add(p_share, b_share, m_share, sem="relaxed")
        else:
            o_share = (i_share.to(tl.int64) * padded_slots + start + o_slot) * WIDTH + FIRST
            tl.store(p_grad_key + o_share[:, None] + o_channel[None, :], b_share, mask=m_share)


def backward_blocks(heads: int, width: int, itemsize: int, shared_bytes: int) -> BackwardBlocks:
    """Cut by rule: the most heads that share one gather within the device's shared memory.

    Query and dout of the head block stay resident beside the blocks of keys. 64 heads and their dquery exceed the
    registers of a program that also computes scores, so dquery is then a kernel of its own.

    Args:
        heads: n.
        width: padded R + padded Dr.
        itemsize: bytes of an element.
        shared_bytes: shared memory a program may use on the device.
    """
    if itemsize == 4:
        return BackwardBlocks("separate", 16, 16, 8, 1, 16, 1, share_keys=16, share_channels=32)
    padded_heads = max(16, triton.next_power_of_2(heads))
    share_channels = 128 if min(128, padded_heads) * 1024 + 64 * 1024 <= shared_bytes else 64
    cuts = [cut for cut in _CUTS if cut.heads <= padded_heads]
    for cut in cuts:
        resident = cut.heads * (2 * width + cut.keys) + cut.keys * cut.stages * width
        if resident * itemsize <= shared_bytes:
            break
    query_stages = 2 if 2 * cut.query_keys * (width + cut.heads) * itemsize <= shared_bytes else 1
    return replace(cut, query_stages=query_stages, share_channels=share_channels)


def launch_backward(
    query: Tensor,
    key: Tensor,
    slots: Tensor,
    counts: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    softmax_scale: float,
    *,
    blocks: BackwardBlocks,
    ordered: bool,
    scratch_bytes: int = SCRATCH_BYTES,
) -> tuple[Tensor, Tensor]:
    """Gradients of query and key; every input contiguous.

    Args:
        query: [T, n, R + Dr].
        key: [S, R + Dr].
        slots: int32 [T, padded K] of `pack_slots`.
        counts: int32 [T] of `pack_slots`.
        out: the forward's output [T, n, R].
        lse: the forward's log-sum-exp fp32 [T, n].
        grad_out: [T, n, R], query's dtype.
        grad_lse: fp32 [T, n], or None for zero.
        softmax_scale: factor of the scores.
        blocks: how the work is cut.
        ordered: add the shares of a key in a fixed order, without atomics.
        scratch_bytes: most bytes of the scratch buffers.

    Returns:
        (dquery in query's dtype, dkey rounded once to key's dtype).
    """
    tokens, heads, width = query.shape
    rank = out.shape[2]
    grad_query = torch.empty_like(query)
    grad_key = torch.zeros(key.shape, dtype=torch.float32, device=key.device)
    if tokens == 0:
        return grad_query, grad_key.to(key.dtype)
    if ordered and blocks.variant == "one_pass":
        raise ValueError("blocks must be of another variant than one_pass for ordered sums, got one_pass")
    sizes = {
        "HEADS": heads,
        "RANK": rank,
        "ROPE": width - rank,
        "COLUMNS_RANK": padded_width(rank),
        "COLUMNS_ROPE": padded_width(width - rank),
        "INTERPRETED": interpreted(),
    }
    share_heads = min(128, max(16, triton.next_power_of_2(heads)))
    share_blocks = triton.cdiv(heads, share_heads)
    padded_slots = slots.shape[1]
    keep = blocks.variant != "one_pass"
    bytes_per_token = padded_slots * (2 * heads * query.element_size() + (4 * share_blocks * width if ordered else 0))
    step = min(tokens, max(1, scratch_bytes // bytes_per_token)) if keep else tokens
    if multiprocessors(query) < step < tokens:
        step -= step % multiprocessors(query)  # a chunk's programs, one or two a multiprocessor, then end together
    kept = query.new_empty((2, step, heads, padded_slots) if keep else (2, 0, heads, 1))
    shares = torch.empty(
        (step, share_blocks, padded_slots, width) if ordered else (0,), dtype=torch.float32, device=key.device
    )
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        num_rows = rows.stop - rows.start
        head_programs = num_rows * triton.cdiv(heads, blocks.heads)
        forward = query[rows], key, slots[rows], counts[rows], out[rows], grad_out[rows], lse[rows]
        grad_lse_rows = None if grad_lse is None else grad_lse[rows]
        if blocks.variant == "hopper":
            from .sparse_mla_hopper import launch_score_gradient_hopper  # Gluon: not every Triton has it

            launch_score_gradient_hopper(
                *forward, grad_lse_rows, grad_query[rows], kept, softmax_scale, written=blocks.share_keys
            )
        else:
            score_gradient_kernel[(head_programs,)](
                *forward,
                lse[rows] if grad_lse_rows is None else grad_lse_rows,
                grad_query[rows],
                grad_key,
                kept[0],
                kept[1],
                softmax_scale,
                padded_slots,
                BLOCK_H=blocks.heads,
                BLOCK_N=blocks.keys,
                STAGES=blocks.stages,
                WRITTEN=max(blocks.keys, blocks.query_keys, blocks.share_keys) if keep else blocks.keys,
                HAS_GRAD_LSE=grad_lse is not None,
                SUM_QUERY=blocks.variant != "separate",
                KEEP=keep,
                ADD_KEYS=not keep,
                num_warps=blocks.warps,
                **sizes,
            )
        if blocks.variant == "separate":
            query_gradient_kernel[(head_programs,)](
                key,
                slots[rows],
                counts[rows],
                kept[1],
                grad_query[rows],
                padded_slots,
                BLOCK_H=blocks.heads,
                BLOCK_N=blocks.query_keys,
                STAGES=blocks.query_stages,
                num_warps=blocks.warps,
                **sizes,
            )
        if not keep:
            continue
        for first, channels in ((0, rank), (rank, width - rank)):
            block_channels = min(blocks.share_channels, padded_width(channels))
            key_share_kernel[(num_rows * share_blocks * triton.cdiv(channels, block_channels),)](
                query[rows],
                grad_out[rows],
                slots[rows],
                counts[rows],
                kept[0],
                kept[1],
                shares if ordered else grad_key,
                padded_slots,
                HEADS=heads,
                RANK=rank,
                ROPE=width - rank,
                FIRST=first,
                CHANNELS=channels,
                BLOCK_C=block_channels,
                BLOCK_H=share_heads,
                BLOCK_N=blocks.share_keys,
                STAGES=blocks.share_stages,
                HAS_VALUE=first == 0,
                ATOMIC=not ordered,
                INTERPRETED=interpreted(),
                num_warps=blocks.share_warps,
            )
        if ordered:
            sum_by_key(shares[:num_rows], slots[rows], counts[rows], grad_key)
    return grad_query, grad_key.to(key.dtype)
