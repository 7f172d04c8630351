"""Scores of the DSA indexer: how much each query row wants each key.

    I[t, s] = sum_h weights[t, h] * relu(q[t, h, :] . k[s, :])      fp32; -inf where row t may not see key s

Layout: q [T, Hi, Di], k [S, Di], weights [T, Hi], unit last strides; scores fp32 [T, S]. One key head serves all
query heads.

A program owns a tile of rows x keys: the key tile stays in shared memory, the heads stream through it, one product a
head, and the weighted sum stays in registers, so that nothing of size [T, Hi, S] exists. Tiles without an allowed
pair are not computed: above the diagonal, and between sequences. Programs walk the keys in groups of row tiles whose
queries fit the L2 cache.

FLOPs: 2*T*S*Hi*Di, about half of it when causal. Bytes written: 4*T*S. Accumulation is fp32; fp32 inputs are
multiplied in full fp32. The tile shape depends on dtype and widths alone, never on T or S: a score's bits do not
change with the rows or keys beside it.
Limits: Di <= 1024; any Hi; q and k fp16, bf16 or fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .key_ranges_kernel import launch_key_ranges
from .operator import operator
from .selection_checks import check_indexer_inputs, check_kernel_width, require_kernel_device
from .sparse_tiles import interpreted, takes_gluon
from .topk_pieces import CAUSAL, RANGES

PREFER_HOPPER_SCORES = True  # the Gluon kernel: a seventh faster on an H200 (32 heads of 128), the same bits


@triton.jit(do_not_specialize=["n_rows", "n_keys", "first_row", "row_units"])
def _indexer_scores_kernel(
    p_q,  # [T, HEADS, DIM]
    p_k,  # [S, DIM]
    p_weights,  # fp32 [T, HEADS]
    p_begin,  # int32 [T] or None
    p_end,
    p_out,  # fp32 [T, S]
    n_rows,
    n_keys,
    first_row,
    stride_q_row,
    stride_q_head,
    stride_k,
    stride_weights,
    row_units,  # row stride of the scores in units of ALIGN elements
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    GROUP: tl.constexpr,  # row tiles that walk the keys together
    RANGE: tl.constexpr,
    ALIGN: tl.constexpr,
    RELU: tl.constexpr,
    FILL: tl.constexpr,  # write -inf into tiles that are not computed
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_tiles = tl.cdiv(n_rows, BLOCK_ROWS)
    key_tiles = tl.cdiv(n_keys, BLOCK_KEYS)
    i_program = tl.program_id(0)
    first_tile = i_program // (GROUP * key_tiles) * GROUP
    group = tl.minimum(row_tiles - first_tile, GROUP)
    i_in_group = i_program % (GROUP * key_tiles)
    row0 = (first_tile + i_in_group % group) * BLOCK_ROWS
    key0 = i_in_group // group * BLOCK_KEYS

    o_row = row0 + tl.arange(0, BLOCK_ROWS)
    o_key = key0 + tl.arange(0, BLOCK_KEYS)
    m_row = o_row < n_rows
    if RANGE == 2:
        b_begin = tl.load(p_begin + o_row, mask=m_row, other=2147483647)
        b_end = tl.load(p_end + o_row, mask=m_row, other=0)
        computed = (tl.min(b_begin) < key0 + BLOCK_KEYS) & (tl.max(b_end) > key0)
    else:
        b_end = first_row + o_row + 1
        computed = first_row + tl.minimum(row0 + BLOCK_ROWS, n_rows) > key0

    p_tile = p_out + o_row[:, None].to(tl.int64) * row_units * ALIGN + o_key[None, :]
    m_tile = m_row[:, None] & (o_key < n_keys)[None, :]
    if computed:
        o_dim = tl.arange(0, BLOCK_DIM)
        m_dim = o_dim < DIM
        o_row_in = tl.minimum(o_row, n_rows - 1).to(
            tl.int64
        )  # rows and keys past the end repeat the last: no masks on the way
        o_key_in = tl.minimum(o_key, n_keys - 1).to(tl.int64)
        p_q_tile = p_q + o_row_in[:, None] * stride_q_row + o_dim[None, :]
        p_k_tile = p_k + o_key_in[:, None] * stride_k + o_dim[None, :]
        p_weight = p_weights + o_row_in * stride_weights
        if BLOCK_DIM == DIM:  # noqa: SIM108 (the compiler takes one branch)
            b_k = tl.load(p_k_tile)
        else:
            b_k = tl.load(p_k_tile, mask=m_dim[None, :], other=0.0)
        if UPCAST:
            b_k = b_k.to(tl.float32)
        b_sum = tl.zeros((BLOCK_ROWS, BLOCK_KEYS), tl.float32)
        for i_head in tl.range(0, HEADS, num_stages=STAGES):
            if BLOCK_DIM == DIM:
                b_q = tl.load(p_q_tile + i_head * stride_q_head)
            else:
                b_q = tl.load(p_q_tile + i_head * stride_q_head, mask=m_dim[None, :], other=0.0)
            if UPCAST:
                b_q = b_q.to(tl.float32)
            b_logit = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            if RELU:
                b_logit = tl.maximum(b_logit, 0.0, propagate_nan=tl.PropagateNan.ALL)
            b_sum += b_logit * tl.load(p_weight + i_head)[:, None]
        m_allowed = o_key[None, :] < b_end[:, None]
        if RANGE == 2:
            m_allowed = m_allowed & (o_key[None, :] >= b_begin[:, None])
        tl.store(p_tile, tl.where(m_allowed, b_sum, float("-inf")), mask=m_tile)
    elif FILL:
        tl.store(p_tile, tl.full((BLOCK_ROWS, BLOCK_KEYS), float("-inf"), tl.float32), mask=m_tile)


@dataclass(frozen=True)
class ScoreBlocks:
    """Tile choices of the kernel."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    group: int


def choose_score_blocks(dtype: torch.dtype, heads: int, width: int, architecture: str = "hopper") -> ScoreBlocks:
    """Tile by dtype and widths; T and S have no say, so that a score's bits do not depend on its neighbours.

    Args:
        dtype: of q and k.
        heads: Hi.
        width: Di.
        architecture: "hopper", whose matrix unit reads shared memory; "cuda", any other NVIDIA GPU; "hip".
    """
    padded = max(16, triton.next_power_of_2(width))
    bytes_per_key = padded * dtype.itemsize
    warps = 4 if architecture == "hopper" and dtype != torch.float32 and width == padded else 8  # masks take registers
    if dtype == torch.float32:
        rows, keys, stages = (
            (32, 64, 2) if bytes_per_key <= 512 else (32, 32, 1) if bytes_per_key <= 1024 else (16, 16, 1)
        )
    elif bytes_per_key <= 256:
        rows, keys, stages = 64, 128, 3
    else:
        rows, keys, stages = (64, 64, 2) if bytes_per_key <= 512 else (32, 32, 1)
    if architecture == "hip":
        stages = 1  # 64 KiB of shared memory
    group = max(1, 2**24 // (rows * heads * bytes_per_key))  # queries of 16 MiB
    return ScoreBlocks(rows, keys, warps, stages, group)


def _architecture(device: torch.device) -> str:
    if torch.version.hip is not None:
        return "hip"
    return "cuda" if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9 else "hopper"


def takes_hopper_scores(index_q: Tensor, index_k: Tensor) -> bool:
    """Whether the kernel of indexer_scores_hopper.py serves these inputs on this device; T and S have no say.

    Contiguous ones, which are what it was tried with on a GPU.
    """
    _, heads, width = index_q.shape
    return (
        takes_gluon(index_q, index_k)
        and width in (64, 128)
        and heads * width < 2**31
        and index_q.is_contiguous()
        and index_k.is_contiguous()
    )


def launch_scores(
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
    blocks: ScoreBlocks | None = None,
) -> None:
    """Write the scores of query rows into out[:, :S].

    Args:
        index_q: [T, Hi, Di], unit last stride.
        index_k: [S, Di] of the same dtype, unit last stride.
        index_weights: fp32 [T, Hi], unit last stride.
        out: fp32 [T, >= S], unit last stride.
        relu: clamp each head's product at zero.
        first_row: index of row 0 in the keys' order. Without begin and end, row r sees the keys 0 .. first_row + r.
        begin, end: int32 [T]; row r sees begin[r] <= key < end[r].
        fill: False leaves tiles without an allowed pair unwritten.
        blocks: tile to use instead of the rule's; None also allows the kernel of indexer_scores_hopper.py, which gives
            the same scores.
    """
    if PREFER_HOPPER_SCORES and blocks is None and takes_hopper_scores(index_q, index_k):
        from .indexer_scores_hopper import launch_scores_hopper  # Gluon: not every Triton has it

        launch_scores_hopper(
            index_q, index_k, index_weights, out, relu=relu, first_row=first_row, begin=begin, end=end, fill=fill
        )
        return
    rows, heads, width = index_q.shape
    keys = index_k.shape[0]
    blocks = blocks or choose_score_blocks(index_q.dtype, heads, width, _architecture(index_q.device))
    align = 4 if out.stride(0) % 4 == 0 else 1
    grid = (triton.cdiv(rows, blocks.rows) * triton.cdiv(keys, blocks.keys),)
    _indexer_scores_kernel[grid](
        index_q,
        index_k,
        index_weights,
        begin,
        end,
        out,
        rows,
        keys,
        first_row,
        index_q.stride(0),
        index_q.stride(1),
        index_k.stride(0),
        index_weights.stride(0),
        out.stride(0) // align,
        HEADS=heads,
        DIM=width,
        BLOCK_DIM=max(16, triton.next_power_of_2(width)),
        BLOCK_ROWS=blocks.rows,
        BLOCK_KEYS=blocks.keys,
        GROUP=blocks.group,
        RANGE=CAUSAL if begin is None else RANGES,
        ALIGN=align,
        RELU=relu,
        FILL=fill,
        UPCAST=bool(triton.knobs.runtime.interpret) and index_q.dtype != torch.float32,
        STAGES=blocks.num_stages,
        num_warps=blocks.num_warps,
    )


def unit_last_stride(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def kernel_queries(index_q: Tensor) -> Tensor:
    """[T, Hi, Di] itself where the kernel reaches every head in 32 bits from its token, or a contiguous copy."""
    reached = (index_q.shape[1] - 1) * index_q.stride(1) < 2**31
    return unit_last_stride(index_q) if reached else index_q.contiguous()


@operator("indexer_scores")
def _indexer_scores(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    relu: bool,
    cu_seqlens: Tensor | None,
    q_positions: Tensor | None,
) -> Tensor:
    rows, keys = index_q.shape[0], index_k.shape[0]
    out = index_q.new_empty((rows, keys), dtype=torch.float32)
    if out.numel() == 0:
        return out
    begin = end = None
    if cu_seqlens is not None or q_positions is not None:
        begin, end = launch_key_ranges(
            rows, keys, device=index_q.device, cu_seqlens=cu_seqlens, q_positions=q_positions
        )
    launch_scores(
        kernel_queries(index_q),
        unit_last_stride(index_k),
        unit_last_stride(index_weights.float()),
        out,
        relu=relu,
        begin=begin,
        end=end,
    )
    return out


@_indexer_scores.register_fake
def _(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    relu: bool,
    cu_seqlens: Tensor | None,
    q_positions: Tensor | None,
) -> Tensor:
    return index_q.new_empty((index_q.shape[0], index_k.shape[0]), dtype=torch.float32)


def _refuse_backward(ctx: object, grad: Tensor) -> None:
    raise RuntimeError(
        "indexer_scores has no fused gradient: train the indexer with indexer_kl, "
        "or use mla_attention.fusions.reference.indexer_scores"
    )


_indexer_scores.register_autograd(_refuse_backward)


def indexer_scores(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    *,
    relu: bool = True,
    cu_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
    budget_bytes: int = 2**30,
) -> Tensor:
    """Scores of every query row against every key, -inf where the row may not see the key.

        I[t, s] = sum_h weights[t, h] * relu(q[t, h, :] . k[s, :])    for start(p) <= s <= p, p = q_positions[t] or t

    start(p) is the first key of p's sequence: 0 without cu_seqlens. A row whose position is negative, or lies past
    the last offset of cu_seqlens, sees nothing. Selection needs no gradient, so this kernel has none (its backward
    raises): the indexer learns through `indexer_kl`, and the unfused twin is differentiable.

    Args:
        index_q: fp16, bf16 or fp32 [T, Hi, Di].
        index_k: [S, Di] of index_q's dtype.
        index_weights: floating [T, Hi], used in fp32; any scale factors are in it.
        relu: clamp each head's product at zero.
        cu_seqlens: int32 or int64 [sequences + 1], offsets of packed sequences in the keys. Without q_positions T
            must equal S.
        q_positions: int32 or int64 [T], index of each row in the keys' order (chunks, context parallelism).
        budget_bytes: bound on scratch memory beside the result, as the twin needs it; the kernel allocates none.

    Returns:
        fp32 [T, S].

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or (under MLA_ATTENTION_VALIDATE=1) offsets or positions are
            out of range.
        RuntimeError: tensors are on the CPU and Triton does not interpret.

    Source: lightning indexer of DeepSeek-V3.2 (DeepSeek-AI, 2025), eq. 1.
    """
    check_indexer_inputs(index_q, index_k, index_weights, cu_seqlens, q_positions, budget_bytes, allow_double=False)
    check_kernel_width(index_q)
    require_kernel_device(index_q, "index_q", "indexer_scores", interpreted())
    return _indexer_scores(index_q, index_k, index_weights, relu, cu_seqlens, q_positions)
