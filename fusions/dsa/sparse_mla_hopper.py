"""Sparse MLA for Hopper, in Triton's Gluon: the products of the portable kernels, with the order of events written out.

The compiler's own pipeline starts the gather of the next keys behind the current block's products, and lets both
warpgroups compute the same scores. Here the gather starts before the scores are waited for, so that it runs beside
scores, softmax and products alike, and each warpgroup computes the scores of half the keys:

    wait for the keys of block j;  start scores(j);  start the gather of block j + 1;  wait for scores(j)
    softmax(j), probabilities to shared memory;  start and await products(j)

(Awaiting products(j) behind the start of scores(j + 1) makes ptxas serialise every product: its note C7514.)
Both buffers of keys, the block's queries (and dout) fill the shared memory: one program a multiprocessor, 64 heads.
Layout, results and limits as sparse_mla_forward.py and sparse_mla_backward.py, but: 16-bit floats, R = 512, Dr = 64, a
multiple of 64 heads, 16-byte aligned tensors. `takes_hopper_kernels` of sparse_tiles.py is the test.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

BLOCK_HEADS = 64
FORWARD_KEYS, BACKWARD_KEYS = 64, 32
_LOG2_E = 1.4426950408889634


@gluon.jit
def _start_gather(
    p_rows,
    o_row,
    o_row_rope,
    latent,
    rope,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    WIDE: gl.constexpr,
    NARROW: gl.constexpr,
):
    """Copy rows to shared memory asynchronously, 16 bytes a thread and step; both vectors hold the same rows."""
    o_rank = gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))
    o_rope = RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))
    p_latent = p_rows + (o_row.to(gl.int64) * (RANK + ROPE))[:, None] + o_rank[None, :]
    p_rope = p_rows + (o_row_rope.to(gl.int64) * (RANK + ROPE))[:, None] + o_rope[None, :]
    async_copy.async_copy_global_to_shared(latent, p_latent)
    async_copy.async_copy_global_to_shared(rope, p_rope)


@gluon.jit
def hopper_forward_kernel(
    p_query,
    p_key,
    p_slots,
    p_counts,
    p_out,
    p_lse,
    scale_log2,
    padded_slots,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    HEAD_BLOCKS: gl.constexpr = HEADS // BLOCK_H
    dtype: gl.constexpr = p_key.dtype.element_ty
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    i_program = gl.program_id(0)
    i_token = (i_program // HEAD_BLOCKS).to(gl.int64)
    first_row = i_token * HEADS + (i_program % HEAD_BLOCKS) * BLOCK_H
    query_latent = gl.allocate_shared_memory(dtype, [BLOCK_H, RANK], SHARED)
    query_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, ROPE], SHARED)
    key_latent = gl.allocate_shared_memory(dtype, [2, BLOCK_N, RANK], SHARED)
    key_rope = gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROPE], SHARED)
    probabilities = gl.allocate_shared_memory(dtype, [BLOCK_H, BLOCK_N], SHARED)

    o_head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, WIDE))
    o_head_narrow = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, NARROW))
    p_block = p_query + first_row * (RANK + ROPE)
    _start_gather(p_block, o_head, o_head_narrow, query_latent, query_rope, RANK, ROPE, WIDE, NARROW)
    count = gl.load(p_counts + i_token)
    blocks = gl.cdiv(count, BLOCK_N)
    p_row = p_slots + i_token * padded_slots + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, WIDE))
    p_row_narrow = p_slots + i_token * padded_slots + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, NARROW))
    b_slot, b_slot_narrow = gl.load(p_row), gl.load(p_row_narrow)
    latent, rope = key_latent.index(0), key_rope.index(0)
    _start_gather(p_key, b_slot, b_slot_narrow, latent, rope, RANK, ROPE, WIDE, NARROW)
    async_copy.commit_group()
    ahead = gl.minimum(BLOCK_N, padded_slots - BLOCK_N)
    b_slot, b_slot_narrow = gl.load(p_row + ahead), gl.load(p_row_narrow + ahead)

    b_max = gl.full([BLOCK_H], -float("inf"), gl.float32, gl.SliceLayout(1, SCORE))  # in units of log2
    b_sum = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORE)  # added up across lanes at the end only
    b_out = gl.zeros([BLOCK_H, RANK], gl.float32, OUT)
    b_zero = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORE)
    o_slot = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORE))
    for j in range(blocks):
        latent, rope = key_latent.index(j % 2), key_rope.index(j % 2)
        async_copy.wait_group(0)
        fence_async_shared()
        b_score = warpgroup_mma(query_rope, rope.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_score = warpgroup_mma(query_latent, latent.permute((1, 0)), b_score, is_async=True)
        if j + 1 < blocks:  # the other buffer: its last reader, the products of block j - 1, was awaited by every warp
            next_latent, next_rope = key_latent.index((j + 1) % 2), key_rope.index((j + 1) % 2)
            _start_gather(p_key, b_slot, b_slot_narrow, next_latent, next_rope, RANK, ROPE, WIDE, NARROW)
        async_copy.commit_group()
        ahead = gl.minimum((j + 2) * BLOCK_N, padded_slots - BLOCK_N)
        b_slot, b_slot_narrow = gl.load(p_row + ahead), gl.load(p_row_narrow + ahead)
        b_score = warpgroup_mma_wait(0, [b_score])
        b_score = gl.where((j * BLOCK_N + o_slot < count)[None, :], b_score, -float("inf"))
        b_new_max = gl.maximum(b_max, gl.max(b_score, 1) * scale_log2)
        b_p = gl.exp2(b_score * scale_log2 - b_new_max[:, None])
        b_fade = gl.exp2(b_max - b_new_max)
        b_max = b_new_max
        b_sum = b_sum * b_fade[:, None] + b_p
        probabilities.store(b_p.to(dtype))
        fence_async_shared()
        b_out = b_out * gl.convert_layout(b_fade, gl.SliceLayout(1, OUT))[:, None]
        b_out = warpgroup_mma(probabilities, latent, b_out, is_async=True)
        b_out = warpgroup_mma_wait(0, [b_out])
    async_copy.wait_group(0)

    b_total = gl.sum(b_sum, 1)
    m_empty = b_total == 0.0  # nothing selected; a NaN sum stays NaN
    b_total = gl.where(m_empty, 1.0, b_total)
    b_lse = gl.where(m_empty, -float("inf"), (b_max + gl.log2(b_total)) * 0.6931471805599453)
    gl.store(p_lse + first_row + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, SCORE)), b_lse)
    b_out = b_out / gl.convert_layout(b_total, gl.SliceLayout(1, OUT))[:, None]
    o_rank = gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))
    p_out_rows = p_out + first_row * RANK + (o_head * RANK)[:, None]
    gl.store(p_out_rows + o_rank[None, :], gl.convert_layout(b_out.to(dtype), WIDE))


@gluon.jit
def hopper_score_gradient_kernel(
    p_query,
    p_key,
    p_slots,
    p_counts,
    p_out,
    p_grad_out,
    p_lse,
    p_grad_lse,
    p_grad_query,
    p_p,
    p_ds,
    scale,
    padded_slots,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WRITTEN: gl.constexpr,
    HAS_GRAD_LSE: gl.constexpr,
    SUM_QUERY: gl.constexpr,
):
    HEAD_BLOCKS: gl.constexpr = HEADS // BLOCK_H
    WIDTH: gl.constexpr = RANK + ROPE
    dtype: gl.constexpr = p_key.dtype.element_ty
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    KEPT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    SHARED_KEPT: gl.constexpr = gl.NVMMASharedLayout(BLOCK_N * 2, 16)
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    SUM_ROPE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROPE // 2, 16])
    i_program = gl.program_id(0)
    i_token = (i_program // HEAD_BLOCKS).to(gl.int64)
    first_row = i_token * HEADS + (i_program % HEAD_BLOCKS) * BLOCK_H
    query_latent = gl.allocate_shared_memory(dtype, [BLOCK_H, RANK], SHARED)
    query_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, ROPE], SHARED)
    grad = gl.allocate_shared_memory(dtype, [BLOCK_H, RANK], SHARED)
    key_latent = gl.allocate_shared_memory(dtype, [2, BLOCK_N, RANK], SHARED)
    key_rope = gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROPE], SHARED)
    p_shared = gl.allocate_shared_memory(dtype, [BLOCK_H, BLOCK_N], SHARED_KEPT)
    ds_shared = gl.allocate_shared_memory(dtype, [BLOCK_H, BLOCK_N], SHARED_KEPT)

    o_head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, WIDE))
    o_head_narrow = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, NARROW))
    o_rank = gl.arange(0, RANK, layout=gl.SliceLayout(0, WIDE))
    p_block = p_query + first_row * WIDTH
    _start_gather(p_block, o_head, o_head_narrow, query_latent, query_rope, RANK, ROPE, WIDE, NARROW)
    count = gl.load(p_counts + i_token)
    blocks = gl.cdiv(count, WRITTEN) * (WRITTEN // BLOCK_N)  # zeros past the count, as the portable kernel writes them
    p_row = p_slots + i_token * padded_slots + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, WIDE))
    p_row_narrow = p_slots + i_token * padded_slots + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, NARROW))
    b_slot, b_slot_narrow = gl.load(p_row), gl.load(p_row_narrow)
    latent, rope = key_latent.index(0), key_rope.index(0)
    _start_gather(p_key, b_slot, b_slot_narrow, latent, rope, RANK, ROPE, WIDE, NARROW)
    async_copy.commit_group()
    o_out = first_row * RANK + (o_head * RANK)[:, None] + o_rank[None, :]
    b_grad = gl.load(p_grad_out + o_out)
    grad.store(b_grad)
    b_delta = gl.sum(b_grad.to(gl.float32) * gl.load(p_out + o_out).to(gl.float32), 1)
    b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, SCORE))
    o_row = first_row + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, SCORE))
    if HAS_GRAD_LSE:
        b_delta -= gl.load(p_grad_lse + o_row)
    b_lse = gl.load(p_lse + o_row) * 1.4426950408889634
    scale_log2 = scale * 1.4426950408889634

    b_zero = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORE)
    b_dq = gl.zeros([BLOCK_H, RANK], gl.float32, SUM)
    b_dq_rope = gl.zeros([BLOCK_H, ROPE], gl.float32, SUM_ROPE)
    o_slot = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORE))
    o_kept_row = first_row + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, KEPT))
    o_kept = (o_kept_row * padded_slots)[:, None] + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, KEPT))[None, :]
    for j in range(blocks):
        latent, rope = key_latent.index(j % 2), key_rope.index(j % 2)
        async_copy.wait_group(0)
        fence_async_shared()
        b_score = warpgroup_mma(query_rope, rope.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_score = warpgroup_mma(query_latent, latent.permute((1, 0)), b_score, is_async=True)
        b_dp = warpgroup_mma(grad, latent.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        if j + 1 < blocks:
            # the slots are loaded late: registers are scarcer here than time beside two products
            b_slot, b_slot_narrow = gl.load(p_row + (j + 1) * BLOCK_N), gl.load(p_row_narrow + (j + 1) * BLOCK_N)
            next_latent, next_rope = key_latent.index((j + 1) % 2), key_rope.index((j + 1) % 2)
            _start_gather(p_key, b_slot, b_slot_narrow, next_latent, next_rope, RANK, ROPE, WIDE, NARROW)
        async_copy.commit_group()
        b_score, b_dp = warpgroup_mma_wait(0, [b_score, b_dp])
        b_p = gl.exp2(b_score * scale_log2 - b_lse[:, None])
        b_p = gl.where((j * BLOCK_N + o_slot < count)[None, :], b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None]) * scale
        p_shared.store(b_p.to(dtype))
        ds_shared.store(b_ds.to(dtype))
        fence_async_shared()
        if SUM_QUERY:
            b_dq = warpgroup_mma(ds_shared, latent, b_dq, is_async=True)
            b_dq_rope = warpgroup_mma(ds_shared, rope, b_dq_rope, is_async=True)
        gl.store(p_p + o_kept + j * BLOCK_N, p_shared.load(KEPT))
        gl.store(p_ds + o_kept + j * BLOCK_N, ds_shared.load(KEPT))
        if SUM_QUERY:
            b_dq, b_dq_rope = warpgroup_mma_wait(0, [b_dq, b_dq_rope])
    async_copy.wait_group(0)
    if SUM_QUERY:
        p_dq = p_grad_query + first_row * WIDTH
        o_rope = RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))
        gl.store(p_dq + (o_head * WIDTH)[:, None] + o_rank[None, :], gl.convert_layout(b_dq.to(dtype), WIDE))
        p_dq_rope = p_dq + (o_head_narrow * WIDTH)[:, None] + o_rope[None, :]
        gl.store(p_dq_rope, gl.convert_layout(b_dq_rope.to(dtype), NARROW))


def launch_forward_hopper(
    query: Tensor,
    key: Tensor,
    slots: Tensor,
    counts: Tensor,
    softmax_scale: float,
    kv_rank: int,
) -> tuple[Tensor, Tensor]:
    """As `launch_forward`, on what this file accepts; returns (out, lse)."""
    tokens, heads, width = query.shape
    out = query.new_empty((tokens, heads, kv_rank))
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    if tokens:
        hopper_forward_kernel[(tokens * (heads // BLOCK_HEADS),)](
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
            BLOCK_H=BLOCK_HEADS,
            BLOCK_N=FORWARD_KEYS,
            num_warps=8,
        )
    return out, lse


def launch_score_gradient_hopper(
    query: Tensor,
    key: Tensor,
    slots: Tensor,
    counts: Tensor,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    grad_query: Tensor,
    kept: Tensor,
    softmax_scale: float,
    *,
    written: int,
    sum_query: bool = True,
) -> None:
    """Write grad_query, and p and ds of whole blocks of `written` slots to kept [2, T, n, padded K]."""
    tokens, heads, width = query.shape
    rank = out.shape[2]
    hopper_score_gradient_kernel[(tokens * (heads // BLOCK_HEADS),)](
        query,
        key,
        slots,
        counts,
        out,
        grad_out,
        lse,
        lse if grad_lse is None else grad_lse,
        grad_query,
        kept[0],
        kept[1],
        softmax_scale,
        slots.stride(0),
        HEADS=heads,
        RANK=rank,
        ROPE=width - rank,
        BLOCK_H=BLOCK_HEADS,
        BLOCK_N=BACKWARD_KEYS,
        WRITTEN=max(written, BACKWARD_KEYS),
        HAS_GRAD_LSE=grad_lse is not None,
        SUM_QUERY=sum_query,
        num_warps=8,
    )
