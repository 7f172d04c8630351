"""Top-k of long score rows in one read: a sample of the row gives a bound that a little more than k elements exceed.

    bound    = a number that, judged by SAMPLE elements of the row, about half as many again as k exceed
    mark[i]  = bits of score > bound, eight times four neighbours     (one read of the row, no barrier on the way)
    slots    = indices of the set bits, ascending; their scores are read again
    boundary, selection: exactly, among the slots

A row is done here when at least k and at most CAPACITY elements exceed the bound: then the k largest are among them.
Every other row (short, fewer than k numbers, a sample that misled, masses of equal scores) is marked in `todo` for
the kernel that takes any row.

Bytes moved: 4*S a row, 32 for each slot and each group of the sample, 8*k written; marks and slots (S/8 + 8*CAPACITY
bytes a program) stay in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .topk_pieces import find_boundary, number_below, order_key, popcount, row_range, select


@triton.jit
def _sampled_bound(
    p_row, begin, end, topk, ALIGN: tl.constexpr, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr, GROUP: tl.constexpr
):
    """The bound; -inf when the sample holds too few numbers to tell.

    Of the sample, share * topk elements are expected among the topk largest of the row, share * CAPACITY among the
    CAPACITY largest, each with a standard deviation of less than its root. The bound must lie between the two: in the
    middle of the roots, 4.5 deviations from either, for a 16th of the row, topk 2048 and CAPACITY 4096. The chance
    that a row of independent scores fails is 1e-6 then, 2e-5 for a 20th, 2e-3 for a 32nd; it is no matter how the
    scores are distributed.
    """
    i_group = tl.arange(0, SAMPLE // GROUP)
    aligned = tl.cdiv(begin, ALIGN) * ALIGN
    width = (end - aligned) // (SAMPLE // GROUP)
    jitter = ((i_group * 7919 & 255) * (width - GROUP + 1)) >> 8  # no period of the data can hide from the sample
    start = tl.multiple_of(aligned + (i_group * width + jitter) // ALIGN * ALIGN, ALIGN)
    b_score = tl.load(p_row + start[:, None] + tl.arange(0, GROUP)[None, :])
    b_score = tl.reshape(b_score, (SAMPLE,), can_reorder=True)
    m_number = b_score > float("-inf")
    largest = tl.max(tl.where(m_number, b_score, float("-inf")))
    near = 0.125 * largest
    counts = tl.sum(tl.where(m_number & (b_score >= near), 65537, tl.where(m_number, 1, 0)))
    numbers = counts & 0xFFFF
    from_near = counts >> 16
    share = SAMPLE / (end - begin).to(tl.float32)
    middle = 0.5 * (tl.sqrt(share * topk.to(tl.float32)) + tl.sqrt(share * CAPACITY))
    rank = tl.maximum((0.985 * middle * middle).to(tl.int32), 1)  # the boundary is found up to a 32nd above it
    bound = float("-inf")
    if numbers > rank:
        low = order_key(near)  # saves the steps around zero, where keys lie far apart and scores close
        from_low = from_near
        if from_near <= rank:
            low = order_key(tl.min(tl.where(m_number, b_score, float("inf"))))
            from_low = numbers
        boundary, ties = find_boundary(b_score, low, order_key(largest), from_low, rank, rank // 32)
        bound = number_below(tl.where(ties > 0, boundary - 1, boundary))  # ties are taken whole
    return bound


@triton.jit
def _load_half(p_half, left, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Scores [i, a, b] of the keys (BLOCK / 8) a + 4 i + b < left, a < 4, b < 4; undefined from `left` on.

    The mask is constant over ALIGN keys, so that the load stays a wide one.
    """
    o_key = (tl.arange(0, BLOCK // 32) * 4)[:, None, None] + (tl.arange(0, 4) * (BLOCK // 8))[None, :, None]
    o_key = o_key + tl.arange(0, 4)[None, None, :]
    return tl.load(p_half + o_key, mask=o_key // ALIGN < tl.cdiv(left, ALIGN))


@triton.jit
def _half_word(b_score, bound):
    """int32 [i]: bit 4 a + b is score[i, a, b] > bound."""
    bit = 1 << ((tl.arange(0, 4) * 4)[None, :, None] + tl.arange(0, 4)[None, None, :])
    return tl.sum(tl.sum(tl.where(b_score > bound, bit, 0), 2), 1)


@triton.jit
def _mark(p_row, p_marks, bound, first, end, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Write the bits of score > bound; bits of keys outside the range are cut off by the reader.

    A thread makes an int32 of the 8 times 4 neighbours that it loads, so that nothing passes between threads. Of a
    block of keys, bit 4 a + b of mark i stands for key (BLOCK / 8) a + 4 i + b. `_load_words` reads every eighth mark:
    these are stored as neighbours.
    """
    MARKS: tl.constexpr = BLOCK // 32
    HALF: tl.constexpr = BLOCK // 2
    o_mark = tl.arange(0, MARKS)
    o_mark = o_mark % 8 * (MARKS // 8) + o_mark // 8
    p_block = p_row + first
    left = end - first
    b_lower = _load_half(p_block, left, ALIGN, BLOCK)
    b_upper = _load_half(p_block + HALF, left - HALF, ALIGN, BLOCK)
    while left > 0:
        p_block += BLOCK
        left -= BLOCK
        b_mark = _half_word(b_lower, bound)
        b_lower = _load_half(p_block, left, ALIGN, BLOCK)  # while the other half is on its way or at work
        b_mark |= _half_word(b_upper, bound) << 16
        b_upper = _load_half(p_block + HALF, left - HALF, ALIGN, BLOCK)
        tl.store(p_marks + o_mark, b_mark)
        p_marks += MARKS


@triton.jit
def _load_words(p_marks, o_word, n_words, BLOCK: tl.constexpr):
    """uint32: bits of 32 neighbouring keys each, put together from the marks of eight threads."""
    EIGHTH: tl.constexpr = BLOCK // 256
    p_mark = p_marks + (o_word // (8 * EIGHTH) * (8 * EIGHTH) + o_word % EIGHTH)
    above = (28 - o_word // EIGHTH % 8 * 4).to(tl.uint32)
    b_word = tl.zeros_like(above)
    for i in tl.static_range(7, -1, -1):
        b_mark = tl.load(p_mark + i * EIGHTH, mask=o_word < n_words, other=0).to(tl.uint32, bitcast=True)
        b_word = (b_word << 4) | ((b_mark << above) >> 28)
    return b_word


@triton.jit
def _list_marked(p_marks, p_slots, begin, first, end, BLOCK: tl.constexpr, WORDS: tl.constexpr, CAPACITY: tl.constexpr):
    """Write the indices of the set bits in ascending order; their number, above CAPACITY when they do not fit."""
    n_words = tl.cdiv(end - first, 32)
    of_first = (begin * 0 - 1).to(tl.uint32, bitcast=True) << (begin - first).to(tl.uint32)
    of_last = (begin * 0 - 1).to(tl.uint32, bitcast=True) >> (n_words * 32 - (end - first)).to(tl.uint32)
    filled = begin * 0
    i_word = begin * 0
    while (i_word < n_words) & (filled <= CAPACITY):
        o_word = i_word + tl.arange(0, WORDS)
        b_index = first + o_word * 32
        b_word = _load_words(p_marks, o_word, n_words, BLOCK)
        b_word = tl.where(o_word == 0, b_word & of_first, b_word)  # only keys of the range
        b_word = tl.where(o_word == n_words - 1, b_word & of_last, b_word)
        b_count = popcount(b_word)
        p_slot = p_slots + 2 * (filled + tl.cumsum(b_count, 0) - b_count)
        filled += tl.sum(b_count)
        if filled <= CAPACITY:
            rounds = tl.max(b_count)
            while rounds > 0:
                lowest = popcount(b_word ^ (b_word - 1)) - 1
                tl.store(p_slot, b_index + lowest, mask=b_word != 0)
                b_word = b_word & (b_word - 1)
                p_slot += 2
                rounds -= 1
        i_word += WORDS
    return filled


@triton.jit(do_not_specialize=["n_rows", "n_keys", "row_units", "first_row", "topk", "out_stride", "marks_stride"])
def topk_sampled_kernel(
    p_scores,  # fp32 [T, S]
    p_begin,  # int32 [T] or None
    p_end,
    p_out,  # int64 [T, >= topk]
    p_todo,  # int32 [T]: 1 for a row that is left
    p_marks,  # int32 [programs, >= S / 32 in whole blocks]
    p_slots,  # int32 [programs, CAPACITY, 2]: the first of two, so that no thread loads neighbours, as `ranks` wants
    n_rows,
    n_keys,
    row_units,  # row stride of the scores in units of ALIGN elements
    first_row,
    topk,
    out_stride,
    marks_stride,
    RANGE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    GROUP: tl.constexpr,
):
    p_marks += tl.program_id(0).to(tl.int64) * marks_stride
    p_slots += tl.program_id(0).to(tl.int64) * (2 * CAPACITY)
    o_slot = tl.arange(0, CAPACITY)
    SHORTEST: tl.constexpr = 2 * CAPACITY if 2 * CAPACITY > SAMPLE else SAMPLE
    i_row = tl.program_id(0)
    while i_row < n_rows:
        p_row = p_scores + i_row.to(tl.int64) * row_units * ALIGN
        begin, end = row_range(p_begin, p_end, i_row, n_keys, first_row, RANGE)
        first = begin // ALIGN * ALIGN
        todo = 1
        if end - begin > SHORTEST:
            bound = _sampled_bound(p_row, begin, end, topk, ALIGN, CAPACITY, SAMPLE, GROUP)
            if bound > float("-inf"):
                _mark(p_row, p_marks, bound, first, end, ALIGN, BLOCK)
                tl.debug_barrier()
                filled = _list_marked(p_marks, p_slots, begin, first, end, BLOCK, WORDS, CAPACITY)
                tl.debug_barrier()
                if (filled >= topk) & (filled <= CAPACITY):
                    b_index = tl.load(p_slots + 2 * o_slot, mask=o_slot < filled, other=0)
                    b_score = tl.load(p_row + b_index, mask=o_slot < filled, other=float("-inf"))
                    boundary = bound  # just topk slots: all of them
                    ties = begin * 0
                    if filled > topk:
                        high = order_key(tl.max(b_score))
                        key, ties = find_boundary(b_score, order_key(bound) + 1, high, filled, topk, 0)
                        boundary = number_below(key)
                    m_selected, b_rank, _, _ = select(b_score, boundary, ties, CAPACITY)
                    p_chosen = p_out + i_row.to(tl.int64) * out_stride
                    tl.store(p_chosen + b_rank, b_index.to(tl.int64), mask=m_selected)
                    todo = 0
        tl.store(p_todo + i_row, todo)
        tl.debug_barrier()  # marks and slots are read before the next row overwrites them
        i_row += tl.num_programs(0)
