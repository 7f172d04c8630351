"""Top-k of long score rows in one read: a sample of the row gives a bound that a little more than k elements exceed.

    bound    = a number that, judged by SAMPLE elements of the row, a few standard deviations more than k exceed
    word[i]  = bits of score[32 i .. 32 i + 31] > bound            (one read of the row, no barrier on the way)
    slots    = indices of the set bits, ascending; their scores are read again
    boundary, selection: exactly, among the slots

A row is done here when at least k and at most CAPACITY elements exceed the bound: then the k largest are among them.
Every other row (short, fewer than k numbers, a sample that misled, masses of equal scores) is marked in `todo` for
the kernel that takes any row.

Bytes moved: 4*S a row, 32 for each slot, 8*k written; words and slots (S/8 + 4*CAPACITY bytes a program) stay in the
L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .topk_pieces import NAN_KEY, NO_KEY, find_boundary, lane_bits, number_below, order_key, popcount, row_range, select


@triton.jit
def _sampled_bound(p_row, begin, end, topk, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr, GROUP: tl.constexpr):
    """The bound; -inf when the sample holds too few numbers to tell.

    The number of sampled elements above a bound has a standard deviation of its square root. Aimed at are 3.5
    deviations more than topk, or the middle between topk and CAPACITY, counted in deviations, whichever is less.
    """
    GROUPS: tl.constexpr = SAMPLE // GROUP
    o_sample = tl.arange(0, SAMPLE)
    i_group = o_sample // GROUP
    width = (end - begin) // GROUPS
    jitter = (
        ((i_group * 7919) & 255) * (width - GROUP + 1)
    ) >> 8  # so that no period of the data can hide from the sample
    b_key = order_key(tl.load(p_row + begin + i_group * width + jitter + o_sample % GROUP))
    share = SAMPLE / (end - begin).to(tl.float32)
    lowest = tl.sqrt(share * topk.to(tl.float32))
    middle = 0.5 * (lowest + tl.sqrt(share * CAPACITY))
    rank = tl.minimum(lowest * lowest + 3.5 * lowest + 3.0, middle * middle + 1.0).to(tl.int32)
    numbers = tl.sum((b_key > NAN_KEY).to(tl.int32))
    bound = float("-inf")
    if numbers > rank:
        boundary, ties = find_boundary(tl.where(b_key == NAN_KEY, NO_KEY, b_key), numbers, rank, rank // 16)
        bound = number_below(tl.where(ties > 0, boundary - 1, boundary))  # ties are taken whole
    return bound


@triton.jit
def _mark(p_row, p_words, bound, first, end, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Write the bits of score > bound; keys outside the range are cut off by the reader.

    The load's mask is constant over ALIGN keys, so that it stays a wide load.
    """
    ROWS: tl.constexpr = BLOCK // 32
    o_key = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    bit = lane_bits()
    start = first
    b_next = tl.load(p_row + start + o_key, mask=(o_key // ALIGN) < tl.cdiv(end - start, ALIGN), other=float("-inf"))
    while start < end:
        b_score = b_next
        left = end - start - BLOCK
        b_next = tl.load(
            p_row + start + BLOCK + o_key, mask=(o_key // ALIGN) < tl.cdiv(left, ALIGN), other=float("-inf")
        )  # ahead of its use
        b_word = tl.sum(tl.where(b_score > bound, bit[None, :], 0), 1)
        tl.store(p_words + (start - first) // 32 + tl.arange(0, ROWS), b_word.to(tl.int32, bitcast=True))
        start += BLOCK


@triton.jit
def _list_marked(p_words, p_slots, begin, first, end, WORDS: tl.constexpr, CAPACITY: tl.constexpr):
    """Write the indices of the set bits in ascending order; their number, above CAPACITY when they do not fit."""
    o_word = tl.arange(0, WORDS)
    n_words = tl.cdiv(end - first, 32)
    filled = begin * 0
    i_word = begin * 0
    while (i_word < n_words) & (filled <= CAPACITY):
        b_index = first + (i_word + o_word) * 32
        b_word = tl.load(p_words + i_word + o_word, mask=i_word + o_word < n_words, other=0).to(tl.uint32, bitcast=True)
        early = tl.minimum(tl.maximum(begin - b_index, 0), 31).to(tl.uint32)
        late = tl.minimum(tl.maximum(b_index + 32 - end, 0), 31).to(tl.uint32)
        b_word = (((b_word >> early) << early) << late) >> late  # only keys of the range
        b_count = popcount(b_word)
        b_slot = filled + tl.cumsum(b_count, 0) - b_count
        filled += tl.sum(b_count)
        if filled <= CAPACITY:
            rounds = tl.max(b_count)
            while rounds > 0:
                lowest = popcount(b_word ^ (b_word - 1)) - 1
                tl.store(p_slots + b_slot, b_index + lowest, mask=b_word != 0)
                b_word = b_word & (b_word - 1)
                b_slot += 1
                rounds -= 1
        i_word += WORDS
    return filled


@triton.jit(do_not_specialize=["n_rows", "n_keys", "row_units", "first_row", "topk", "out_stride", "words_stride"])
def topk_sampled_kernel(
    p_scores,  # fp32 [T, S]
    p_begin,  # int32 [T] or None
    p_end,
    p_out,  # int64 [T, >= topk]
    p_todo,  # int32 [T]: 1 for a row that is left
    p_words,  # int32 [programs, >= S / 32 in whole blocks]
    p_slots,  # int32 [programs, CAPACITY]
    n_rows,
    n_keys,
    row_units,  # row stride of the scores in units of ALIGN elements
    first_row,
    topk,
    out_stride,
    words_stride,
    RANGE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    GROUP: tl.constexpr,
):
    p_words += tl.program_id(0).to(tl.int64) * words_stride
    p_slots += tl.program_id(0).to(tl.int64) * CAPACITY
    o_slot = tl.arange(0, CAPACITY)
    i_row = tl.program_id(0)
    while i_row < n_rows:
        p_row = p_scores + i_row.to(tl.int64) * row_units * ALIGN
        begin, end = row_range(p_begin, p_end, i_row, n_keys, first_row, RANGE)
        first = begin // ALIGN * ALIGN
        todo = 1
        if end - begin > 2 * CAPACITY:
            bound = _sampled_bound(p_row, begin, end, topk, CAPACITY, SAMPLE, GROUP)
            if bound > float("-inf"):
                _mark(p_row, p_words, bound, first, end, ALIGN, BLOCK)
                tl.debug_barrier()
                filled = _list_marked(p_words, p_slots, begin, first, end, WORDS, CAPACITY)
                tl.debug_barrier()
                if (filled >= topk) & (filled <= CAPACITY):
                    b_index = tl.load(p_slots + o_slot, mask=o_slot < filled, other=0)
                    b_score = tl.load(p_row + b_index, mask=o_slot < filled, other=float("-inf"))
                    b_key = order_key(b_score)
                    boundary = begin * 0 + (NO_KEY + 1)  # just topk slots: all of them
                    ties = begin * 0
                    if filled > topk:
                        boundary, ties = find_boundary(b_key, filled, topk, 0)
                    m_selected, b_rank, _, _ = select(b_key, boundary, ties, CAPACITY)
                    p_chosen = p_out + i_row.to(tl.int64) * out_stride
                    tl.store(p_chosen + b_rank, b_index.to(tl.int64), mask=m_selected)
                    todo = 0
        tl.store(p_todo + i_row, todo)
        tl.debug_barrier()  # words and slots are read before the next row overwrites them
        i_row += tl.num_programs(0)
