"""Exact top-k of score rows, indices ascending, ties to the lower index.

    key(x)     = x as a 32-bit integer that orders like it: -0.0 -> 0.0, NaN -> below every number, -inf -> no key
    boundary   = the largest v with count(key > v) <= k <= count(key >= v)
    selected   = {key > boundary} and, of the ties {key == boundary}, the k - count(key > boundary) lowest indices

Layout: scores fp32 [T, S]; result int64 [T, k_eff], k_eff = min(topk, S); unused slots -1, trailing.

Three kernels, one result:
    sampled   long rows whose sample gives a good bound: `topk_sampled.py`
    buffered  any row: elements above a running bound are appended, in index order, to a buffer; when it is full the
              exact top-k of what was seen is kept and the bound rises to its smallest element. One read of the row.
    bisected  a `topk` too large for a buffer: bisects keys over the row itself, up to 32 reads.

No atomics: the result is a function of the row alone.

Bytes moved: 4*T*S read, 8*T*k written, plus scratch of 8*capacity bytes a resident program, which stays in the L2
cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operator import operator
from .selection_checks import check_scores, check_topk, require_kernel_device
from .sparse_tiles import interpreted
from .topk_pieces import (
    ALL_KEYS,
    NAN_KEY,
    NO_KEY,
    TOP_KEY,
    find_boundary,
    load_scores,
    number_below,
    order_key,
    ranks,
    row_range,
    select,
)
from .topk_sampled import topk_sampled_kernel

_SMALLEST_CAPACITY = 1024
_LARGEST_CAPACITY = 16384


@triton.jit
def _buffered_row(p_row, p_chosen, p_slots, begin, end, topk, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    """Top-k of the keys begin .. end - 1 of one row."""
    o_block = tl.arange(0, BLOCK)
    o_slot = tl.arange(0, CAPACITY)
    bound = float("-inf")
    start = begin
    filled = begin * 0
    unfinished = True
    while unfinished:
        # append what exceeds the bound, until the row ends or a block does not fit
        b_next = load_scores(p_row, start, end, BLOCK)
        fits = True
        while fits & (start < end):
            b_score = b_next
            b_next = load_scores(p_row, start + BLOCK, end, BLOCK)  # ahead of its use
            m_keep = ~(b_score <= bound)  # NaN is kept, and loses later
            b_rank, kept = ranks(m_keep, BLOCK)
            fits = filled + kept <= CAPACITY
            if fits:
                b_index = (start + o_block).to(tl.uint32).to(tl.int64)
                b_entry = (b_score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | b_index
                tl.store(p_slots + filled + b_rank, b_entry, mask=m_keep)
                filled += kept
                start += BLOCK
        ended = start >= end

        tl.debug_barrier()
        b_entry = tl.load(p_slots + o_slot)
        b_key = order_key((b_entry >> 32).to(tl.int32).to(tl.float32, bitcast=True))
        b_key = tl.where(o_slot < filled, b_key, NO_KEY)
        boundary = begin * 0 + (NO_KEY + 1)  # up to topk entries: all of them
        ties = begin * 0
        if filled > topk:
            high = tl.max(b_key)
            low = tl.min(tl.where(b_key == NO_KEY, high, b_key))
            boundary, ties = find_boundary(b_key, low, high, filled, topk, 0)
        m_selected, b_rank, count, _ = select(b_key, boundary, ties, CAPACITY)
        tl.debug_barrier()  # the whole buffer is in registers before any entry moves
        if ended:
            tl.store(p_chosen + b_rank, b_entry & 0xFFFFFFFF, mask=m_selected)
            tl.store(p_chosen + o_slot, -1, mask=(o_slot >= count) & (o_slot < topk))
        else:
            tl.store(p_slots + b_rank, b_entry, mask=m_selected)
            bound = number_below(boundary)
        filled = count
        unfinished = ~ended


@triton.jit(do_not_specialize=["n_rows", "n_keys", "row_stride", "first_row", "topk", "out_stride", "buffer_stride"])
def _topk_buffered_kernel(
    p_scores,  # fp32 [T, S]
    p_begin,  # int32 [T] or None
    p_end,
    p_out,  # int64 [T, >= topk]
    p_todo,  # int32 [T]: rows to take; None: all
    p_buffer,  # int64 [programs, CAPACITY]: score bits << 32 | key index
    n_rows,
    n_keys,
    row_stride,
    first_row,
    topk,
    out_stride,
    buffer_stride,
    RANGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,  # >= topk + BLOCK
    TURNS: tl.constexpr,
):
    p_slots = p_buffer + tl.program_id(0).to(tl.int64) * buffer_stride
    o_turn = tl.arange(0, TURNS)
    turns = tl.cdiv(n_rows - tl.program_id(0), tl.num_programs(0))  # rows of this program
    first_turn = 0
    while first_turn < turns:
        m_left = o_turn < turns - first_turn
        if p_todo is not None:  # many rows looked up at once, as hardly any is left
            o_row = tl.program_id(0) + (first_turn + o_turn) * tl.num_programs(0)
            m_left = tl.load(p_todo + o_row, mask=m_left, other=0) != 0
        i_turn = tl.min(tl.where(m_left, o_turn, TURNS))
        while i_turn < TURNS:
            i_row = tl.program_id(0) + (first_turn + i_turn) * tl.num_programs(0)
            p_row = p_scores + i_row.to(tl.int64) * row_stride
            p_chosen = p_out + i_row.to(tl.int64) * out_stride
            begin, end = row_range(p_begin, p_end, i_row, n_keys, first_row, RANGE)
            _buffered_row(p_row, p_chosen, p_slots, begin, end, topk, BLOCK, CAPACITY)
            i_turn = tl.min(tl.where(m_left & (o_turn > i_turn), o_turn, TURNS))
        first_turn += TURNS


@triton.jit(do_not_specialize=["n_rows", "n_keys", "row_stride", "first_row", "topk", "out_stride"])
def _topk_bisected_kernel(
    p_scores,
    p_begin,
    p_end,
    p_out,
    n_rows,
    n_keys,
    row_stride,
    first_row,
    topk,
    out_stride,
    RANGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_block = tl.arange(0, BLOCK)
    p_row = p_scores + i_row.to(tl.int64) * row_stride
    p_chosen = p_out + i_row.to(tl.int64) * out_stride
    begin, end = row_range(p_begin, p_end, i_row, n_keys, first_row, RANGE)

    start = begin
    valid = begin * 0
    while start < end:
        b_key = order_key(load_scores(p_row, start, end, BLOCK))
        valid += tl.sum((b_key != NO_KEY).to(tl.int32))
        start += BLOCK

    low = begin * 0 + NAN_KEY
    high = begin * 0 + TOP_KEY
    above = begin * 0
    if valid <= topk:  # all of them lie above the boundary
        low = begin * 0 + (NO_KEY + 1)
        high = low
        above = valid
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # mean, rounded up, without overflow
        count = begin * 0
        start = begin
        while start < end:
            b_key = order_key(load_scores(p_row, start, end, BLOCK))
            count += tl.sum((b_key >= middle).to(tl.int32))
            start += BLOCK
        low = tl.where(count == topk, middle - 1, tl.where(count > topk, middle, low))
        high = tl.where(count == topk, middle - 1, tl.where(count > topk, high, middle - 1))
        above = tl.where(count <= topk, count, above)

    ties = topk - above  # not to be had when all are taken
    filled = begin * 0
    start = begin
    while start < end:
        b_key = order_key(load_scores(p_row, start, end, BLOCK))
        m_selected, b_rank, count, tie_count = select(b_key, low, ties, BLOCK)
        tl.store(p_chosen + filled + b_rank, (start + o_block).to(tl.int64), mask=m_selected)
        filled += count
        ties -= tl.minimum(tie_count, ties)
        start += BLOCK
    start = filled
    while start < topk:
        tl.store(p_chosen + start + o_block, -1, mask=start + o_block < topk)
        start += BLOCK


@dataclass(frozen=True)
class TopkBlocks:
    """Choices of the kernels; results never depend on them."""

    capacity: int  # entries of a row's buffer, a power of two, >= 2 * topk
    num_warps: int
    sample: int  # elements that judge a long row, a power of two; 0: the buffered kernel takes every row
    group: int  # neighbours in the sample, a power of two of at least 4
    mark_block: int  # elements a step of the sampled kernel's read
    programs_per_sm: int
    max_registers: int | None  # per thread; more registers, fewer resident programs


def choose_topk_blocks(topk: int, keys: int | None = None) -> TopkBlocks | None:
    """Choices by rule; None asks for the bisected kernel.

    `topk` alone decides, also where it exceeds the number of keys, so that rows of any length share one compilation.
    Only a `topk` that is too large for a buffer is cut to `keys`.
    """
    if keys is not None and 2 * topk > _LARGEST_CAPACITY:
        topk = min(topk, keys)
    capacity = max(_SMALLEST_CAPACITY, triton.next_power_of_2(2 * topk))
    if capacity > _LARGEST_CAPACITY:
        return None
    warps = min(16, max(4, capacity // 512))
    return TopkBlocks(
        capacity,
        warps,
        sample=min(2048, capacity),
        group=4,
        mark_block=1024 * warps,
        programs_per_sm=16 // warps,
        max_registers=128,
    )


def choose_sample(blocks: TopkBlocks, topk: int, keys: int) -> tuple[int, int]:
    """(elements of the sample, neighbours in it): four times as many, in groups twice as large, for the longest rows.

    These are rows with fewer than 120 of their topk largest elements in the smaller sample, that is, for a topk of
    2048, with more than 35k keys. The larger one serves up to 140k keys as well; at 256k it fails one row in 800.
    """
    few = blocks.sample * topk < 120 * keys
    return (4 * blocks.sample, 2 * blocks.group) if few else (blocks.sample, blocks.group)


def _wide_loads(scores: Tensor) -> int:
    """4 when rows start at multiples of four elements and a load of four may reach past the last key, else 1."""
    rows, keys = scores.shape
    reach = scores.storage_offset() + (rows - 1) * scores.stride(0) + triton.cdiv(keys, 4) * 4
    fits = scores.element_size() * reach <= scores.untyped_storage().nbytes()
    return 4 if scores.stride(0) % 4 == 0 and fits else 1


def launch_topk(
    scores: Tensor,
    out: Tensor,
    *,
    topk: int,
    key_range: int = ALL_KEYS,
    first_row: int = 0,
    begin: Tensor | None = None,
    end: Tensor | None = None,
    blocks: TopkBlocks | None = None,
    bisect: bool = False,
) -> None:
    """Write the top-k of each score row into out[:, :topk].

    Args:
        scores: fp32 [T, S], unit last stride; entries outside a row's key range take no part, whatever they hold.
        out: int64 [T, >= topk], unit last stride.
        topk: at least 1, at most S.
        key_range: `ALL_KEYS`; `CAUSAL`: row r has the keys 0 .. first_row + r; `RANGES`: begin[r] .. end[r] - 1.
        begin: int32 [T].
        end: int32 [T].
        blocks: choices to use instead of the rule's.
        bisect: take the kernel that a large `topk` takes.
    """
    rows, keys = scores.shape
    device = scores.device
    blocks = blocks or choose_topk_blocks(topk)
    shape = (first_row, topk, out.stride(0))
    if bisect or blocks is None:
        _topk_bisected_kernel[(rows,)](
            scores, begin, end, out, rows, keys, scores.stride(0), *shape, RANGE=key_range, BLOCK=4096, num_warps=8
        )
        return
    programs = min(rows, 4)  # the interpreter runs programs one after another
    options = {"num_warps": blocks.num_warps}
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        programs = min(rows, blocks.programs_per_sm * processors)
        if blocks.max_registers and torch.version.hip is None:
            options["maxnreg"] = blocks.max_registers
    todo = None
    if blocks.sample and keys > 2 * blocks.capacity:
        align = _wide_loads(scores)
        sample, group = choose_sample(blocks, topk, keys)
        todo = torch.empty(rows, dtype=torch.int32, device=device)
        marks = triton.cdiv(keys + align, blocks.mark_block) * blocks.mark_block // 32
        topk_sampled_kernel[(programs,)](
            scores,
            begin,
            end,
            out,
            todo,
            torch.empty((programs, marks), dtype=torch.int32, device=device),
            torch.empty((programs, 2 * blocks.capacity), dtype=torch.int32, device=device),
            rows,
            keys,
            scores.stride(0) // align,
            *shape,
            marks,
            RANGE=key_range,
            ALIGN=align,
            BLOCK=blocks.mark_block,
            WORDS=1024,
            CAPACITY=blocks.capacity,
            SAMPLE=sample,
            GROUP=group,
            **options,
        )
    _topk_buffered_kernel[(programs,)](
        scores,
        begin,
        end,
        out,
        todo,
        torch.empty((programs, blocks.capacity), dtype=torch.int64, device=device),
        rows,
        keys,
        scores.stride(0),
        *shape,
        blocks.capacity,
        RANGE=key_range,
        BLOCK=min(2048, blocks.capacity // 2),
        CAPACITY=blocks.capacity,
        TURNS=128,
        **options,
    )


@operator("topk_select")
def _topk_select(scores: Tensor, topk: int) -> Tensor:
    taken = min(topk, scores.shape[1])
    out = scores.new_empty((scores.shape[0], taken), dtype=torch.int64)
    if out.numel():
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        launch_topk(scores, out, topk=taken, blocks=choose_topk_blocks(topk, scores.shape[1]))
    return out


@_topk_select.register_fake
def _(scores: Tensor, topk: int) -> Tensor:
    return scores.new_empty((scores.shape[0], min(topk, scores.shape[1])), dtype=torch.int64)


def topk_select(scores: Tensor, topk: int) -> Tensor:
    """Indices of the `topk` largest scores of each row, ascending, ties to the lower index.

        selected[t] = the min(topk, number of keys) first keys of row t in the order (score descending, index ascending)

    -0.0 equals 0.0; NaN ranks below every number, so it is taken only where a row has fewer than `topk` numbers; -inf
    marks a key that is not allowed and is never taken. Exact and deterministic; no gradient.

    Args:
        scores: fp32 [T, S]; any strides.
        topk: number of keys to select, >= 1.

    Returns:
        int64 [T, k_eff], k_eff = min(topk, S); slots without a key hold -1 and come last.

    Raises:
        ValueError: scores is no fp32 matrix, or topk no positive integer.
        RuntimeError: scores is on the CPU and Triton does not interpret.

    Source: the selection step of DeepSeek-V3.2's lightning indexer (DeepSeek-AI, 2025), with the tie order fixed.
    """
    check_scores(scores, allow_double=False)
    check_topk(topk)
    require_kernel_device(scores, "scores", "topk_select", interpreted())
    with torch.no_grad():
        return _topk_select(scores, topk)
