"""The indexer's divergence over all keys a row may see: tiled passes without a tensor of size [heads, T, S].

    lse[t, h]  = log sum_s exp(softmax_scale * query[t, h] . key[s])                          `dense_lse`
    sums[t, s] = sum_h exp(softmax_scale * query[t, h] . key[s] - lse[t, h])                  `dense_head_sums`
    dq[t, h], dw[t, h], dk[s] from d[t, s] = d kl / d scores[t, s]                            `dense_indexer_gradient`

over begin[t] <= s < end[t]; the scores themselves come from indexer_scores. The caller walks the query rows in tiles,
so sums and d are [rows of a tile, S]. Tiles without an allowed pair are skipped. dk is the work of programs that own
their keys: no atomics, the result depends on the inputs and the tile height alone.

FLOPs (half of it when causal): 2 T S n (R + Dr) each of the first two, 8 T S Hi Di the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sparse_tiles import interpreted, load_tile, loop_bound, matmul, padded_width, shared_memory, store_tile

_LOG2_E = 1.4426950408889634
_UNIT = 1024.0  # products with the gradient are formed in units of max |w| / 1024: half precision holds them


@triton.jit
def _row_ranges(p_begin, p_end, o_row, m_row):
    """begin and end of the rows [M], and the smallest and largest of them as scalars."""
    b_begin = tl.load(p_begin + o_row, mask=m_row, other=2147483647)
    b_end = tl.load(p_end + o_row, mask=m_row, other=0)
    b_begin = tl.where(b_begin < b_end, b_begin, 2147483647)  # an empty row asks for nothing
    return b_begin, b_end, tl.min(b_begin, 0), tl.max(b_end, 0)


@triton.jit
def _dot_chunk(
    p_query_rows,
    p_key_rows,
    i_chunk,
    b_acc,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the products over one chunk of channels."""
    o_column = i_chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    if WIDTH % BLOCK_C == 0:
        b_query = tl.load(p_query_rows + o_column[None, :])
        b_key = tl.load(p_key_rows + o_column[None, :])
    else:
        m_column = (o_column < WIDTH)[None, :]
        b_query = tl.load(p_query_rows + o_column[None, :], mask=m_column, other=0.0)
        b_key = tl.load(p_key_rows + o_column[None, :], mask=m_column, other=0.0)
    return matmul(b_query, tl.trans(b_key), b_acc, INTERPRETED)


@triton.jit(do_not_specialize=["num_rows", "num_keys"])
def dense_lse_kernel(
    p_query,
    p_key,
    p_begin,
    p_end,
    p_lse,
    scale_log2,
    num_rows,
    num_keys,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    i_program = tl.program_id(0)
    i_head = i_program % HEADS  # the heads of a row block run side by side: they read the same keys
    o_row = (i_program // HEADS) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < num_rows
    b_begin, b_end, first, last = _row_ranges(p_begin, p_end, o_row, m_row)
    first = tl.minimum(first, last) // BLOCK_N * BLOCK_N
    o_row_in = tl.minimum(o_row, num_rows - 1).to(tl.int64)
    p_query_rows = p_query + ((o_row_in * HEADS + i_head) * WIDTH)[:, None]

    b_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)  # in units of log2
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    steps = tl.cdiv(last - first, BLOCK_N) * CHUNKS
    for i_step in tl.range(0, loop_bound(steps, INTERPRETED), num_stages=STAGES):
        i_chunk = i_step % CHUNKS
        o_key = first + i_step // CHUNKS * BLOCK_N + tl.arange(0, BLOCK_N)
        p_key_rows = p_key + (tl.minimum(o_key, num_keys - 1).to(tl.int64) * WIDTH)[:, None]
        b_acc = _dot_chunk(p_query_rows, p_key_rows, i_chunk, b_acc, WIDTH, BLOCK_C, INTERPRETED)
        if i_chunk == CHUNKS - 1:
            m_allowed = (o_key[None, :] >= b_begin[:, None]) & (o_key[None, :] < b_end[:, None])
            b_score = tl.where(m_allowed, b_acc * scale_log2, -float("inf"))
            b_new_max = tl.maximum(b_max, tl.max(b_score, 1))
            b_shift = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)
            b_sum = b_sum * tl.exp2(b_max - b_shift) + tl.sum(tl.exp2(b_score - b_shift[:, None]), 1)
            b_max = b_new_max
            b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    m_empty = b_sum == 0.0
    b_lse = (b_max + tl.log2(tl.where(m_empty, 1.0, b_sum))) * 0.6931471805599453
    tl.store(p_lse + o_row_in * HEADS + i_head, tl.where(m_empty, -float("inf"), b_lse), mask=m_row)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "stride_sums"])
def dense_head_sums_kernel(
    p_query,
    p_key,
    p_begin,
    p_end,
    p_lse,
    p_sums,
    scale_log2,
    num_rows,
    num_keys,
    stride_sums,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    key_blocks = tl.cdiv(num_keys, BLOCK_N)
    i_program = tl.program_id(0)
    o_row = (i_program // key_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_key = (i_program % key_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row = o_row < num_rows
    b_begin, b_end, first, last = _row_ranges(p_begin, p_end, o_row, m_row)
    if (first < (i_program % key_blocks + 1) * BLOCK_N) & (last > (i_program % key_blocks) * BLOCK_N):
        o_row_in = tl.minimum(o_row, num_rows - 1).to(tl.int64)
        p_key_rows = p_key + (tl.minimum(o_key, num_keys - 1).to(tl.int64) * WIDTH)[:, None]
        m_allowed = (o_key[None, :] >= b_begin[:, None]) & (o_key[None, :] < b_end[:, None])
        b_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i_step in tl.range(0, HEADS * CHUNKS, num_stages=STAGES):
            i_head = i_step // CHUNKS
            i_chunk = i_step % CHUNKS
            p_query_rows = p_query + ((o_row_in * HEADS + i_head) * WIDTH)[:, None]
            b_acc = _dot_chunk(p_query_rows, p_key_rows, i_chunk, b_acc, WIDTH, BLOCK_C, INTERPRETED)
            if i_chunk == CHUNKS - 1:
                b_lse = tl.load(p_lse + o_row_in * HEADS + i_head) * 1.4426950408889634
                b_sums += tl.where(m_allowed, tl.exp2(b_acc * scale_log2 - b_lse[:, None]), 0.0)
                b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        p_sums_tile = p_sums + (o_row_in * stride_sums)[:, None] + o_key[None, :]
        tl.store(p_sums_tile, b_sums, mask=m_row[:, None] & (o_key < num_keys)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_keys", "stride_d"])
def dense_query_gradient_kernel(
    p_q,
    p_k,
    p_weights,
    p_d,
    p_grad_kl,
    p_begin,
    p_end,
    p_grad_q,
    p_grad_weights,
    num_rows,
    num_keys,
    stride_d,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    RELU: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    i_program = tl.program_id(0)
    i_head = i_program % HEADS
    o_row = (i_program // HEADS) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < num_rows
    o_column = tl.arange(0, COLUMNS)
    b_begin, b_end, first, last = _row_ranges(p_begin, p_end, o_row, m_row)
    first = tl.minimum(first, last) // BLOCK_N * BLOCK_N
    o_row_in = tl.minimum(o_row, num_rows - 1).to(tl.int64)
    o_head_row = o_row_in * HEADS + i_head
    b_q = load_tile(p_q + (o_head_row * DIM)[:, None], o_column, m_row, DIM, False, COLUMNS)  # [BLOCK_M, Di]
    b_dq = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    b_dw = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.range(loop_bound(first, INTERPRETED), loop_bound(last, INTERPRETED), BLOCK_N, num_stages=STAGES):
        o_key = start + tl.arange(0, BLOCK_N)
        p_keys = p_k + (tl.minimum(o_key, num_keys - 1).to(tl.int64) * DIM)[:, None]
        b_k = load_tile(p_keys, o_column, None, DIM, False, COLUMNS)  # [BLOCK_N, Di]
        m_allowed = (o_key[None, :] >= b_begin[:, None]) & (o_key[None, :] < b_end[:, None])
        b_d = tl.load(p_d + (o_row_in * stride_d)[:, None] + o_key[None, :], mask=m_allowed, other=0.0)
        b_dot = matmul(b_q, tl.trans(b_k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), INTERPRETED)
        if RELU:
            b_d = tl.where(b_dot > 0.0, b_d, 0.0)
        b_dw += tl.sum(b_dot * b_d, 1)
        b_dq = matmul((b_d * UNIT).to(b_k.dtype), b_k, b_dq, INTERPRETED)
    b_grad_kl = tl.load(p_grad_kl + o_row_in)
    b_factor = tl.load(p_weights + o_head_row) * b_grad_kl / UNIT
    p_dq_rows = p_grad_q + (o_head_row * DIM)[:, None]
    store_tile(p_dq_rows, o_column, b_dq * b_factor[:, None], m_row, DIM, True, COLUMNS)
    tl.store(p_grad_weights + o_head_row, b_dw * b_grad_kl, mask=m_row)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "stride_d"])
def dense_key_gradient_kernel(
    p_q,
    p_k,
    p_weights,
    p_d,
    p_begin,
    p_end,
    p_grad_k,
    num_rows,
    num_keys,
    stride_d,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    RELU: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    i_block = tl.program_id(0)
    o_key = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_key = o_key < num_keys
    o_column = tl.arange(0, COLUMNS)
    o_key_in = tl.minimum(o_key, num_keys - 1).to(tl.int64)
    b_k = load_tile(p_k + (o_key_in * DIM)[:, None], o_column, m_key, DIM, False, COLUMNS)  # [BLOCK_N, Di]
    b_dk = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    for row in tl.range(0, loop_bound(num_rows, INTERPRETED), BLOCK_M):
        o_row = row + tl.arange(0, BLOCK_M)
        m_row = o_row < num_rows
        b_begin, b_end, first, last = _row_ranges(p_begin, p_end, o_row, m_row)
        if (first < (i_block + 1) * BLOCK_N) & (last > i_block * BLOCK_N):
            o_row_in = tl.minimum(o_row, num_rows - 1).to(tl.int64)
            m_allowed = (o_key[:, None] >= b_begin[None, :]) & (o_key[:, None] < b_end[None, :])
            p_d_tile = p_d + (o_row_in * stride_d)[None, :] + o_key[:, None]
            b_d = tl.load(p_d_tile, mask=m_allowed, other=0.0)  # [BLOCK_N, BLOCK_M]
            for i_head in tl.range(0, HEADS, num_stages=STAGES):
                o_head_row = o_row_in * HEADS + i_head
                b_q = load_tile(p_q + (o_head_row * DIM)[:, None], o_column, m_row, DIM, False, COLUMNS)
                b_ds = b_d * tl.load(p_weights + o_head_row)[None, :]
                if RELU:
                    b_dot = matmul(b_k, tl.trans(b_q), tl.zeros((BLOCK_N, BLOCK_M), tl.float32), INTERPRETED)
                    b_ds = tl.where(b_dot > 0.0, b_ds, 0.0)
                b_dk = matmul(b_ds.to(b_q.dtype), b_q, b_dk, INTERPRETED)
    p_dk_rows = p_grad_k + (o_key_in * DIM)[:, None]
    store_tile(p_dk_rows, o_column, b_dk, m_key, DIM, True, COLUMNS)


@dataclass(frozen=True)
class DenseBlocks:
    """How a kernel cuts its work: rows and keys a tile, warps, pipelined loads, channels a step of the attention."""

    rows: int
    keys: int
    warps: int
    stages: int
    channels: int = 64


def attention_tile(itemsize: int, shared_bytes: int) -> DenseBlocks:
    """Cut by rule of the two attention kernels."""
    if interpreted():
        return DenseBlocks(16, 32, 4, 1, 32)
    if itemsize == 4:
        return DenseBlocks(32, 32, 4, 1, 32)
    if shared_bytes >= 200 * 1024:
        return DenseBlocks(128, 128, 8, 4)
    return DenseBlocks(128, 128, 8, 3) if shared_bytes >= 100 * 1024 else DenseBlocks(64, 64, 4, 1)


def indexer_tile(itemsize: int, columns: int) -> tuple[DenseBlocks, DenseBlocks]:
    """Cut by rule of the query and the key gradient."""
    if interpreted():
        return DenseBlocks(16, 32, 4, 1), DenseBlocks(16, 32, 4, 1)
    if itemsize == 4 or columns > 128:
        return DenseBlocks(16, 16, 4, 1), DenseBlocks(16, 16, 4, 1)
    return DenseBlocks(64, 64, 4, 1), DenseBlocks(64, 64, 4, 1)


def dense_lse(
    query: Tensor,
    key: Tensor,
    begin: Tensor,
    end: Tensor,
    softmax_scale: float,
    *,
    blocks: DenseBlocks | None = None,
) -> Tensor:
    """Natural log-sum-exp of the attention scores over begin <= s < end, fp32 [T, n]; -inf for an empty range.

    Args:
        query: [T, n, D], contiguous.
        key: [S, D], contiguous.
        begin: int32 [T].
        end: int32 [T].
        softmax_scale: factor of the scores.
        blocks: another cut than the rule's.
    """
    rows, heads, width = query.shape
    lse = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
    if rows == 0 or key.shape[0] == 0:
        return lse.fill_(-torch.inf)
    blocks = blocks or attention_tile(query.element_size(), shared_memory(query))
    dense_lse_kernel[(triton.cdiv(rows, blocks.rows) * heads,)](
        query,
        key,
        begin,
        end,
        lse,
        softmax_scale * _LOG2_E,
        rows,
        key.shape[0],
        HEADS=heads,
        WIDTH=width,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.keys,
        BLOCK_C=blocks.channels,
        STAGES=blocks.stages,
        INTERPRETED=interpreted(),
        num_warps=blocks.warps,
    )
    return lse


def dense_head_sums(
    query: Tensor,
    key: Tensor,
    begin: Tensor,
    end: Tensor,
    lse: Tensor,
    softmax_scale: float,
    out: Tensor,
    *,
    blocks: DenseBlocks | None = None,
) -> None:
    """Write head-summed attention probabilities fp32 [T, S] to out, for every pair with begin <= s < end.

    Args:
        query: [T, n, D], contiguous.
        key: [S, D], contiguous.
        begin: int32 [T].
        end: int32 [T].
        lse: fp32 [T, n] over the same ranges.
        softmax_scale: factor of the scores.
        out: fp32 [T, S]; other pairs become 0 or, in tiles without an allowed one, stay as they are.
        blocks: another cut than the rule's.
    """
    rows, heads, width = query.shape
    if out.numel() == 0:
        return
    blocks = blocks or attention_tile(query.element_size(), shared_memory(query))
    dense_head_sums_kernel[(triton.cdiv(rows, blocks.rows) * triton.cdiv(key.shape[0], blocks.keys),)](
        query,
        key,
        begin,
        end,
        lse,
        out,
        softmax_scale * _LOG2_E,
        rows,
        key.shape[0],
        out.stride(0),
        HEADS=heads,
        WIDTH=width,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.keys,
        BLOCK_C=blocks.channels,
        STAGES=blocks.stages,
        INTERPRETED=interpreted(),
        num_warps=blocks.warps,
    )


def dense_indexer_gradient(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    gradient: Tensor,
    grad_kl: Tensor,
    begin: Tensor,
    end: Tensor,
    *,
    relu: bool,
    blocks: tuple[DenseBlocks, DenseBlocks] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the indexer's inputs from a tile of d kl / d scores.

    Args:
        index_q: [T, Hi, Di], contiguous.
        index_k: [S, Di], contiguous.
        index_weights: fp32 [T, Hi], contiguous.
        gradient: d kl / d scores fp32 [T, S], read where begin <= s < end.
        grad_kl: gradient of each row's divergence fp32 [T].
        begin: int32 [T].
        end: int32 [T].
        relu: whether dot products were clipped at 0.
        blocks: another cut than the rule's, of the query and of the key gradient.

    Returns:
        (dq [T, Hi, Di] in index_q's dtype, dk fp32 [S, Di], dw fp32 [T, Hi]).
    """
    rows, heads, dim = index_q.shape
    keys = index_k.shape[0]
    grad_q, grad_weights = torch.empty_like(index_q), torch.empty_like(index_weights)
    grad_k = torch.empty(index_k.shape, dtype=torch.float32, device=index_k.device)
    if rows == 0 or keys == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_weights.zero_()
    columns = padded_width(dim)
    sizes = {"HEADS": heads, "DIM": dim, "COLUMNS": columns, "RELU": relu, "INTERPRETED": interpreted()}
    query_blocks, key_blocks = blocks or indexer_tile(index_q.element_size(), columns)
    dense_query_gradient_kernel[(triton.cdiv(rows, query_blocks.rows) * heads,)](
        index_q,
        index_k,
        index_weights,
        gradient,
        grad_kl,
        begin,
        end,
        grad_q,
        grad_weights,
        rows,
        keys,
        gradient.stride(0),
        BLOCK_M=query_blocks.rows,
        BLOCK_N=query_blocks.keys,
        UNIT=_UNIT,
        STAGES=query_blocks.stages,
        num_warps=query_blocks.warps,
        **sizes,
    )
    weighted = index_weights * grad_kl[:, None]
    unit = weighted.abs().amax().clamp_min(1e-30) / _UNIT
    dense_key_gradient_kernel[(triton.cdiv(keys, key_blocks.keys),)](
        index_q,
        index_k,
        weighted / unit,
        gradient,
        begin,
        end,
        grad_k,
        rows,
        keys,
        gradient.stride(0),
        BLOCK_M=key_blocks.rows,
        BLOCK_N=key_blocks.keys,
        STAGES=key_blocks.stages,
        num_warps=key_blocks.warps,
        **sizes,
    )
    return grad_q, grad_k.mul_(unit), grad_weights
