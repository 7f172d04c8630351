"""Sparse MLA forward: one program a token and a block of heads, every selected key gathered once for the whole block.

    x[h, j]  = softmax_scale * q[h] . key[slot_j]
    out[h]   = sum_j softmax_j(x[h, j]) * key[slot_j, :R]           online softmax over blocks of BLOCK_N slots, fp32

Layout: query [T, n, R + Dr], key [S, R + Dr], slots int32 [T, padded K] with counts [T] (see sparse_tiles),
out [T, n, R], lse fp32 [T, n], all contiguous. The grid walks the head blocks of one token before the next token, so
that they find the token's keys in the L2 cache.

Slots are read one block ahead: the gather then does not wait for an index, and the compiler can keep several blocks of
keys in flight. FLOPs: 2 * T * n * K * (2 R + Dr). Gathered bytes: T * K * (R + Dr) * itemsize a head block.
Limits: no head, R or Dr is special; a padded width costs the work of its power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sparse_tiles import (
    interpreted,
    load_tile,
    loop_bound,
    matmul,
    padded_width,
    shared_memory,
    store_tile,
    takes_hopper_kernels,
)

_LOG2_E = 1.4426950408889634
_SCRATCH_BYTES = 8 * 1024  # of shared memory, for changes of layout
_LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class ForwardBlocks:
    """How the forward kernel cuts its work.

    Attributes:
        heads: heads a program (at least 16; 64 is where Hopper's warpgroup products start).
        keys: slots a loop step.
        warps: warps a program.
        stages: blocks of keys in shared memory.
    """

    heads: int
    keys: int
    warps: int
    stages: int


@triton.jit
def sparse_mla_forward_kernel(
    p_query,
    p_key,
    p_slots,
    p_counts,
    p_out,
    p_lse,
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
    WRITE_OUT: tl.constexpr,
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

    p_rows = p_query + i_token * HEADS * WIDTH + o_head[:, None] * WIDTH
    b_query = load_tile(p_rows, o_rank, m_head, RANK, MASK_HEADS, COLUMNS_RANK)  # [BLOCK_H, R]
    b_query_rope = load_tile(p_rows + RANK, o_rope, m_head, ROPE, MASK_HEADS, COLUMNS_ROPE)  # [BLOCK_H, Dr]

    b_max = tl.full((BLOCK_H,), -float("inf"), tl.float32)  # in units of log2
    b_sum = tl.zeros((BLOCK_H,), tl.float32)
    b_out = tl.zeros((BLOCK_H, COLUMNS_RANK), tl.float32)
    count = tl.load(p_counts + i_token)
    p_row_slots = p_slots + i_token * padded_slots
    b_slot = tl.load(p_row_slots + o_slot)
    for start in tl.range(0, loop_bound(count, INTERPRETED), BLOCK_N, num_stages=STAGES):
        p_keys = p_key + b_slot.to(tl.int64)[:, None] * WIDTH
        b_key = load_tile(p_keys, o_rank, None, RANK, False, COLUMNS_RANK)  # [BLOCK_N, R]
        b_key_rope = load_tile(p_keys + RANK, o_rope, None, ROPE, False, COLUMNS_ROPE)  # [BLOCK_N, Dr]
        b_slot = tl.load(p_row_slots + tl.minimum(start + BLOCK_N, padded_slots - BLOCK_N) + o_slot)  # read ahead
        b_score = matmul(b_query_rope, tl.trans(b_key_rope), tl.zeros((BLOCK_H, BLOCK_N), tl.float32), INTERPRETED)
        b_score = matmul(b_query, tl.trans(b_key), b_score, INTERPRETED)
        b_score = tl.where((start + o_slot < count)[None, :], b_score * scale_log2, -float("inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_score, 1))
        b_p = tl.exp2(b_score - b_new_max[:, None])  # [BLOCK_H, BLOCK_N]
        b_fade = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_fade + tl.sum(b_p, 1)
        b_max = b_new_max
        if WRITE_OUT:
            b_out = matmul(b_p.to(b_key.dtype), b_key, b_out * b_fade[:, None], INTERPRETED)

    m_empty = b_sum == 0.0  # nothing selected; a NaN sum stays NaN
    b_lse = tl.where(m_empty, -float("inf"), (b_max + tl.log2(tl.where(m_empty, 1.0, b_sum))) * _LN_2)
    tl.store(p_lse + i_token * HEADS + o_head, b_lse, mask=m_head)
    if WRITE_OUT:
        b_out = b_out / tl.where(m_empty, 1.0, b_sum)[:, None]
        p_out_rows = p_out + i_token * HEADS * RANK + o_head[:, None] * RANK
        store_tile(p_out_rows, o_rank, b_out, m_head, RANK, MASK_HEADS, COLUMNS_RANK)


def forward_blocks(heads: int, width: int, itemsize: int, shared_bytes: int) -> ForwardBlocks:
    """Cut by rule: as many heads as share one gather, and as many key blocks in flight as shared memory holds.

    Args:
        heads: n.
        width: padded R + padded Dr.
        itemsize: bytes of an element.
        shared_bytes: shared memory a program may use on the device.
    """
    if itemsize == 4:
        return ForwardBlocks(16, 16, 8, 2)
    block_heads = min(64, max(16, triton.next_power_of_2(heads)))
    candidates = [(64, 2), (32, 3), (32, 2), (16, 2)] if block_heads == 64 else [(32, 2), (16, 2)]
    for keys, stages in candidates:
        if (block_heads + keys * stages) * width * itemsize + _SCRATCH_BYTES <= shared_bytes:
            return ForwardBlocks(block_heads, keys, 8 if block_heads >= 32 else 4, stages)
    return ForwardBlocks(16, 16, 4, 1)


def launch_forward(
    query: Tensor,
    key: Tensor,
    slots: Tensor,
    counts: Tensor,
    softmax_scale: float,
    kv_rank: int,
    *,
    blocks: ForwardBlocks | None = None,
    write_out: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel on contiguous inputs and packed slots; returns (out, lse).

    Args:
        query: [T, n, R + Dr].
        key: [S, R + Dr].
        slots: int32 [T, padded K] of `pack_slots`.
        counts: int32 [T] of `pack_slots`.
        softmax_scale: factor of the scores.
        kv_rank: R.
        blocks: another cut than the rule's; None also allows the kernel of sparse_mla_hopper.py.
        write_out: False computes lse only, and returns an empty out.
    """
    tokens, heads, width = query.shape
    if blocks is None and write_out and takes_hopper_kernels(query, key, kv_rank):
        from .sparse_mla_hopper import launch_forward_hopper  # Gluon: not every Triton has it

        return launch_forward_hopper(query, key, slots, counts, softmax_scale, kv_rank)
    rank, rope = padded_width(kv_rank), padded_width(width - kv_rank)
    out = query.new_empty((tokens, heads, kv_rank) if write_out else (0, heads, kv_rank))
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    if tokens == 0:
        return out, lse
    blocks = blocks or forward_blocks(heads, rank + rope, query.element_size(), shared_memory(query))
    sparse_mla_forward_kernel[(tokens * triton.cdiv(heads, blocks.heads),)](
        query,
        key,
        slots,
        counts,
        out,
        lse,
        softmax_scale * _LOG2_E,
        slots.stride(0),
        HEADS=heads,
        RANK=kv_rank,
        ROPE=width - kv_rank,
        COLUMNS_RANK=rank,
        COLUMNS_ROPE=rope,
        BLOCK_H=blocks.heads,
        BLOCK_N=blocks.keys,
        STAGES=blocks.stages,
        WRITE_OUT=write_out,
        INTERPRETED=interpreted(),
        num_warps=blocks.warps,
    )
    return out, lse
