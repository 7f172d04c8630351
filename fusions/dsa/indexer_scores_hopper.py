"""Scores of the DSA indexer for Hopper, in Triton's Gluon: the sums of the portable kernel, with copies, products and
sums each at work all the time.

One program a multiprocessor walks the tiles of 64 rows x 256 keys. One warp copies, ahead of their use and on into the
next tile: the tile's keys, then the queries of head after head, through the tensor memory accelerator. Two warpgroups
compute, half of the keys each and neither waiting for the other, so that both share each copy of the queries:

    start logits(h + 1);  wait for logits(h), give up their queries' place;  sum += weight(h) * relu(logits(h))

(Once in `unroll` heads a warpgroup lets its products run out, beside the other's: logits in flight from one turn of a
loop to the next make ptxas serialise every product, its note C7514. The sum is written in assembly because the compiler
otherwise moves it behind the start of the product that reuses its registers.)

A score is the portable kernel's, bit for bit: the same instructions add the same products in the same order. Rows and
keys past the end arrive as zeros and are not stored. Shared memory: the queries of 6 heads, the keys of 2 tiles.
Layout and results as indexer_scores.py, but: 16-bit floats, Di 64 or 128, contiguous queries and keys that start at a
multiple of 16 bytes. `takes_hopper_scores` of indexer_scores.py is the test.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .sparse_tiles import multiprocessors
from .topk_pieces import CAUSAL, RANGES

BLOCK_ROWS, HALF_KEYS, BUFFERS = 64, 128, 2
LAUNCH_REGISTERS, COMPUTE_REGISTERS, COPY_REGISTERS = 168, 240, 24  # 12 warps x 168 = 8 x 240 + 4 x 24


@gluon.jit
def _place(i_tile, n_rows, n_keys, GROUP: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """First row and first key of a tile; GROUP row tiles walk the keys together."""
    key_tiles = gl.cdiv(n_keys, KEYS)
    first_tile = i_tile // (GROUP * key_tiles) * GROUP
    group = gl.minimum(gl.cdiv(n_rows, ROWS) - first_tile, GROUP)
    i_in_group = i_tile % (GROUP * key_tiles)
    return (first_tile + i_in_group % group) * ROWS, i_in_group // group * KEYS


@gluon.jit
def _has_pair(
    row0,
    key0,
    n_rows,
    first_row,
    p_begin,
    p_end,
    RANGE: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Whether a row of the tile may see a key of it; the same answer in every warp that asks."""
    if RANGE == 2:
        EVERY_WARP: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [WARPS], [0])  # no warp needs another's rows
        o_row = row0 + gl.arange(0, ROWS, layout=EVERY_WARP)
        b_begin = gl.load(p_begin + o_row, mask=o_row < n_rows, other=2147483647)
        b_end = gl.load(p_end + o_row, mask=o_row < n_rows, other=0)
        return (gl.min(b_begin, 0) < key0 + KEYS) & (gl.max(b_end, 0) > key0)
    else:
        return first_row + gl.minimum(row0 + ROWS, n_rows) > key0


@gluon.jit
def _copy_tiles(queries, keys, shared, limits, HEADS: gl.constexpr, GROUP: gl.constexpr, RANGE: gl.constexpr):
    """The copying warp. A barrier's first phase counts as over, so that the first wait for an empty place passes."""
    q_shared, k_shared, q_ready, q_empty, k_ready, k_empty = shared
    p_begin, p_end, n_rows, n_keys, first_row, stride_head = limits
    STAGES: gl.constexpr = q_shared.shape[0]
    BUFFERS: gl.constexpr = k_shared.shape[0] // 2
    ROWS: gl.constexpr = q_shared.shape[1]
    HALF: gl.constexpr = k_shared.shape[1]
    tiles = gl.cdiv(n_rows, ROWS) * gl.cdiv(n_keys, 2 * HALF)
    n_heads = 0  # copied so far: place and phase of the next
    n_tiles = 0
    for i_tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row0, key0 = _place(i_tile, n_rows, n_keys, GROUP, ROWS, 2 * HALF)
        if _has_pair(row0, key0, n_rows, first_row, p_begin, p_end, RANGE, ROWS, 2 * HALF, 1):
            i_buffer = n_tiles % BUFFERS
            k_barrier = k_ready.index(i_buffer)
            mbarrier.wait(k_empty.index(i_buffer), (n_tiles // BUFFERS & 1) ^ 1)
            mbarrier.expect(k_barrier, 2 * keys.block_type.nbytes)
            tma.async_copy_global_to_shared(keys, [key0, 0], k_barrier, k_shared.index(2 * i_buffer))
            tma.async_copy_global_to_shared(keys, [key0 + HALF, 0], k_barrier, k_shared.index(2 * i_buffer + 1))
            n_tiles += 1
            for i_head in range(HEADS):
                i_stage = n_heads % STAGES
                q_barrier = q_ready.index(i_stage)
                mbarrier.wait(q_empty.index(i_stage), (n_heads // STAGES & 1) ^ 1)
                mbarrier.expect(q_barrier, queries.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    queries, [row0, i_head * stride_head], q_barrier, q_shared.index(i_stage)
                )
                n_heads += 1


@gluon.jit
def _start_logits(q_shared, q_ready, b_keys, b_logit, n_heads):
    """Start the product of the next head's queries into b_logit's registers, whose values do not count."""
    STAGES: gl.constexpr = q_shared.shape[0]
    mbarrier.wait(q_ready.index(n_heads % STAGES), n_heads // STAGES & 1)
    return warpgroup_mma(q_shared.index(n_heads % STAGES), b_keys, b_logit, use_acc=False, is_async=True)


@gluon.jit
def _add_logits(b_sum, b_logit, b_weight, RELU: gl.constexpr):
    """sum + weight * relu(logits), here and not later; NaN stays NaN."""
    b_factor, _ = gl.broadcast(b_weight[:, None], b_sum)
    RELU_CODE: gl.constexpr = "{ .reg .f32 t; max.NaN.f32 t, $1, 0f00000000; fma.rn.f32 $0, t, $2, $3; }"
    CODE: gl.constexpr = RELU_CODE if RELU else "fma.rn.f32 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(
        CODE, "=f,f,f,0", [b_logit, b_factor, b_sum], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _add_heads(
    b_sum, b_zero, p_weight, q_shared, q_ready, q_empty, b_keys, n_heads, RELU: gl.constexpr, COUNT: gl.constexpr
):
    """Add COUNT heads, the product of each started before the one before it is added."""
    STAGES: gl.constexpr = q_shared.shape[0]
    b_weight = gl.load(p_weight)
    logits = _start_logits(q_shared, q_ready, b_keys, b_zero, n_heads)
    b_free = b_zero
    for i in gl.static_range(COUNT):
        if i + 1 < COUNT:
            b_next_weight = gl.load(p_weight + i + 1)
            next_logits = _start_logits(q_shared, q_ready, b_keys, b_free, n_heads + i + 1)
            b_logit = warpgroup_mma_wait(1, [logits])
        else:
            b_logit = warpgroup_mma_wait(0, [logits])
        mbarrier.arrive(q_empty.index((n_heads + i) % STAGES), count=1)
        b_sum = _add_logits(b_sum, b_logit, b_weight, RELU)
        b_free = b_logit
        if i + 1 < COUNT:
            logits, b_weight = next_logits, b_next_weight
    return b_sum


@gluon.jit
def _compute_tiles(
    shared,
    tensors,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    RANGE: gl.constexpr,
    ALIGN: gl.constexpr,
    RELU: gl.constexpr,
    FILL: gl.constexpr,
    UNROLL: gl.constexpr,
    I_HALF: gl.constexpr,
):
    """A computing warpgroup: half I_HALF of every tile's keys."""
    q_shared, k_shared, q_ready, q_empty, k_ready, k_empty = shared
    p_weights, p_begin, p_end, p_out, n_rows, n_keys, first_row, stride_weights, row_units = tensors
    BUFFERS: gl.constexpr = k_shared.shape[0] // 2
    ROWS: gl.constexpr = q_shared.shape[1]
    HALF: gl.constexpr = k_shared.shape[1]
    LOGIT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    UNROLLED: gl.constexpr = HEADS // UNROLL * UNROLL
    tiles = gl.cdiv(n_rows, ROWS) * gl.cdiv(n_keys, 2 * HALF)
    n_heads = 0
    n_tiles = 0
    for i_tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row0, key0 = _place(i_tile, n_rows, n_keys, GROUP, ROWS, 2 * HALF)
        computed = _has_pair(row0, key0, n_rows, first_row, p_begin, p_end, RANGE, ROWS, 2 * HALF, 4)
        o_row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOGIT))
        o_key = key0 + I_HALF * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LOGIT))
        m_row = o_row < n_rows
        b_sum = gl.full([ROWS, HALF], -float("inf"), gl.float32, LOGIT)
        if computed:
            i_buffer = n_tiles % BUFFERS
            p_weight = p_weights + gl.minimum(o_row, n_rows - 1).to(gl.int64) * stride_weights
            b_keys = k_shared.index(2 * i_buffer + I_HALF).permute((1, 0))
            b_zero = gl.zeros([ROWS, HALF], gl.float32, LOGIT)
            b_sum = b_zero
            mbarrier.wait(k_ready.index(i_buffer), n_tiles // BUFFERS & 1)
            for i_head in range(0, UNROLLED, UNROLL):
                b_sum = _add_heads(
                    b_sum, b_zero, p_weight + i_head, q_shared, q_ready, q_empty, b_keys, n_heads, RELU, UNROLL
                )
                n_heads += UNROLL
            if UNROLLED < HEADS:
                b_sum = _add_heads(
                    b_sum,
                    b_zero,
                    p_weight + UNROLLED,
                    q_shared,
                    q_ready,
                    q_empty,
                    b_keys,
                    n_heads,
                    RELU,
                    HEADS - UNROLLED,
                )
                n_heads += HEADS - UNROLLED
            mbarrier.arrive(k_empty.index(i_buffer), count=1)
            n_tiles += 1
            if RANGE == 2:
                b_begin = gl.load(p_begin + o_row, mask=m_row, other=0)
                b_end = gl.load(p_end + o_row, mask=m_row, other=0)
                m_allowed = (o_key[None, :] < b_end[:, None]) & (o_key[None, :] >= b_begin[:, None])
            else:
                m_allowed = o_key[None, :] <= first_row + o_row[:, None]
            b_sum = gl.where(m_allowed, b_sum, -float("inf"))
        if FILL or computed:  # four threads write a whole sector of 32 bytes
            p_tile = p_out + (o_row.to(gl.int64) * row_units * ALIGN)[:, None] + o_key[None, :]
            if key0 + (I_HALF + 1) * HALF <= n_keys:
                gl.store(p_tile, b_sum, mask=m_row[:, None])
            else:
                gl.store(p_tile, b_sum, mask=m_row[:, None] & (o_key < n_keys)[None, :])


@gluon.jit(do_not_specialize=["n_rows", "n_keys", "first_row", "row_units"])
def hopper_scores_kernel(
    queries,  # [T, rows of all heads], box [ROWS, DIM]
    keys,  # [S, DIM], box [HALF, DIM]
    p_weights,  # fp32 [T, HEADS]
    p_begin,  # int32 [T] where RANGE is RANGES
    p_end,
    p_out,  # fp32 [T, S]
    n_rows,
    n_keys,
    first_row,
    stride_head,
    stride_weights,
    row_units,  # row stride of the scores in units of ALIGN elements
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    RANGE: gl.constexpr,
    ALIGN: gl.constexpr,
    RELU: gl.constexpr,
    FILL: gl.constexpr,  # write -inf into tiles that are not computed
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    UNROLL: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    ROWS: gl.constexpr = queries.block_type.shape[0]
    HALF: gl.constexpr = keys.block_type.shape[0]
    DIM: gl.constexpr = keys.block_type.shape[1]
    q_shared = gl.allocate_shared_memory(queries.dtype, [STAGES, ROWS, DIM], queries.layout)
    k_shared = gl.allocate_shared_memory(keys.dtype, [2 * BUFFERS, HALF, DIM], keys.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)  # both warpgroups
    for i in gl.static_range(BUFFERS):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    shared = (q_shared, k_shared, q_ready, q_empty, k_ready, k_empty)
    tensors = (p_weights, p_begin, p_end, p_out, n_rows, n_keys, first_row, stride_weights, row_units)
    limits = (p_begin, p_end, n_rows, n_keys, first_row, stride_head)
    gl.warp_specialize(
        [
            (_compute_tiles, (shared, tensors, HEADS, GROUP, RANGE, ALIGN, RELU, FILL, UNROLL, 0)),
            (_compute_tiles, (shared, tensors, HEADS, GROUP, RANGE, ALIGN, RELU, FILL, UNROLL, 1)),
            (_copy_tiles, (queries, keys, shared, limits, HEADS, GROUP, RANGE)),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, COPY_REGISTERS],
    )


@dataclass(frozen=True)
class HopperScoreBlocks:
    """Choices of the kernel that no score depends on."""

    stages: int = 6  # heads' queries in shared memory
    unroll: int = 4  # heads between two moments without a product in flight
    group: int | None = None  # row tiles that walk the keys together; None: 16 MiB of queries


def launch_scores_hopper(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    out: Tensor,
    *,
    relu: bool,
    first_row: int = 0,
    begin: Tensor | None = None,
    end: Tensor | None = None,
    fill: bool = True,
    blocks: HopperScoreBlocks | None = None,
) -> None:
    """As `launch_scores`, on what this file accepts; a tile is twice as wide where `fill` is False."""
    rows, heads, width = index_q.shape
    keys = index_k.shape[0]
    blocks = blocks or HopperScoreBlocks()
    group = blocks.group or max(1, 2**24 // (BLOCK_ROWS * heads * width * index_q.element_size()))
    align = 4 if out.stride(0) % 4 == 0 else 1
    swizzled = gl.NVMMASharedLayout(128, 16, rank=2)
    columns = heads * width
    queries = TensorDescriptor(index_q, [rows, columns], [columns, 1], [BLOCK_ROWS, width], swizzled)
    tiles = triton.cdiv(rows, BLOCK_ROWS) * triton.cdiv(keys, 2 * HALF_KEYS)
    hopper_scores_kernel[(min(tiles, multiprocessors(index_q)),)](
        queries,
        TensorDescriptor(index_k, [keys, width], [width, 1], [HALF_KEYS, width], swizzled),
        index_weights,
        index_weights if begin is None else begin,
        index_weights if end is None else end,
        out,
        rows,
        keys,
        first_row,
        width,
        index_weights.stride(0),
        out.stride(0) // align,
        HEADS=heads,
        GROUP=group,
        RANGE=CAUSAL if begin is None else RANGES,
        ALIGN=align,
        RELU=relu,
        FILL=fill,
        STAGES=blocks.stages,
        BUFFERS=BUFFERS,
        UNROLL=blocks.unroll,
        COMPUTE_REGISTERS=COMPUTE_REGISTERS,
        COPY_REGISTERS=COPY_REGISTERS,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
    )
