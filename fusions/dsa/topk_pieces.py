"""Pieces of the top-k kernels: integer keys that order like scores, the boundary of the k largest, ranks.

    key(x)   = x as a 32-bit integer that orders like the number: -0.0 -> 0.0, NaN -> below every number, -inf -> no key
    boundary = the largest v with count(key > v) <= k <= count(key >= v)
    selected = {key > boundary} and, of the ties {key == boundary}, the k - count(key > boundary) first ones

Tiles are one-dimensional and hold one element a lane, so that a vote of 32 lanes stands for 32 neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

ALL_KEYS, CAUSAL, RANGES = 0, 1, 2  # which keys a row has: all; those up to its own index; begin[row] <= key < end[row]

NO_KEY = tl.constexpr(-(2**31))  # -inf: never selected
NAN_KEY = tl.constexpr(-(2**31) + 0x7FFFFF)  # where -inf would order; below every number's key
TOP_KEY = tl.constexpr(0x7F800000)  # +inf


@triton.jit
def order_key(x):
    """Integer that orders like the fp32 number; 0.0 and -0.0 share one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, NAN_KEY, key)
    return tl.where(x == float("-inf"), NO_KEY, key)


@triton.jit
def number_of(key):
    """fp32 number with that key; x >= number_of(key) exactly when x's key is at least `key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def number_below(key):
    """fp32 number v with: x > v exactly when x's key is above `key`. -inf for the key of NaN."""
    # -1 would be -0.0's, which no element has, and -0.0 is not below 0.0
    return number_of(tl.where(key == -1, -2, key))


@triton.jit
def row_range(p_begin, p_end, i_row, n_keys, first_row, RANGE: tl.constexpr):
    """Keys begin <= key < end of a row."""
    begin = n_keys * 0
    end = n_keys
    if RANGE == 1:
        end = tl.minimum(first_row + i_row + 1, n_keys)
    if RANGE == 2:
        begin = tl.load(p_begin + i_row)
        end = tl.minimum(tl.load(p_end + i_row), n_keys)
    return begin, end


@triton.jit
def load_scores(p_row, start, end, BLOCK: tl.constexpr):
    """Scores of the keys start .. start + BLOCK - 1, -inf from `end` on."""
    o_key = tl.arange(0, BLOCK)
    return tl.load(p_row + start + o_key.to(tl.int64), mask=o_key < end - start, other=float("-inf"))


@triton.jit
def lane_bits():
    """uint32 [32]: 1 << lane."""
    o_lane = tl.arange(0, 32).to(tl.uint32)
    return (o_lane * 0 + 1) << o_lane


@triton.jit
def popcount(x):
    """Set bits of each uint32; the compiler knows this idiom and makes it one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def ranks(mask, SIZE: tl.constexpr):
    """(how many are set before each element of a mask, how many in all): votes of 32 lanes, scanned."""
    bit = lane_bits()
    b_word = tl.sum(tl.where(tl.reshape(mask, (SIZE // 32, 32)), bit[None, :], 0), 1)
    b_count = popcount(b_word)
    b_before = tl.cumsum(b_count, 0) - b_count
    b_rank = b_before[:, None] + popcount(b_word[:, None] & (bit - 1)[None, :])
    return tl.reshape(b_rank, (SIZE,)), tl.sum(b_count)


@triton.jit
def find_boundary(b_value, low, high, filled, k, slack):
    """(boundary, ties to take) of a tile with `filled` > k keys, all of them low <= key <= high.

    The tile, of less than 2^16 elements, holds keys, or scores: what is no number counts nowhere then. Ends early once
    a probe separates k to k + slack elements: no tie is to be taken then.

    Two probes a step are counted in one reduction. They lie around the place where the boundary would be if the
    elements from `low` to `high` were spread evenly. In the first step they lie nearer to `low`, as a tail thins out;
    every sixth step cuts into thirds, whatever the distribution.
    """
    from_low = filled  # count(key >= low)
    above = k * 0  # count(key > high)
    step = k * 0
    while low < high:
        share = (from_low - k).to(tl.float32) / (from_low - above).to(tl.float32)  # 0 < share < 1
        spread = 0.2 * tl.minimum(share, 1.0 - share)
        lower = tl.where(step == 0, 0.25 * share, tl.where(step % 6 == 5, 0.33, share - spread))
        upper = tl.where(step == 0, 0.75 * share, tl.where(step % 6 == 5, 0.67, share + spread))
        width = (high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)).to(tl.float32)  # int32 overflows
        lower = low + tl.maximum((lower * width).to(tl.uint32), 1).to(tl.int32, bitcast=True)
        upper = low + tl.maximum((upper * width).to(tl.uint32), 1).to(tl.int32, bitcast=True)
        if b_value.dtype == tl.float32:
            m_lower = b_value >= number_of(lower)
            m_upper = b_value >= number_of(upper)
        else:
            m_lower = b_value >= lower
            m_upper = b_value >= upper
        counts = tl.sum(tl.where(m_upper, 65537, tl.where(m_lower, 1, 0)))
        from_lower = counts & 0xFFFF
        from_upper = counts >> 16
        most = k + slack
        if (from_lower < k) | (from_upper > most) | ((from_lower > most) & (from_upper < k)):
            low = tl.where(from_upper > most, upper, tl.where(from_lower > most, lower, low))
            from_low = tl.where(from_upper > most, from_upper, tl.where(from_lower > most, from_lower, from_low))
            high = tl.where(from_lower < k, lower - 1, tl.where(from_upper < k, upper - 1, high))
            above = tl.where(from_lower < k, from_lower, tl.where(from_upper < k, from_upper, above))
        else:
            low = tl.where(from_upper >= k, upper, lower) - 1
            high = low
            above = k
        step += 1
    return low, k - above


@triton.jit
def select(b_value, boundary, ties, SIZE: tl.constexpr):
    """(mask of selected elements, rank of each among them, their number, ties met) of keys, or of scores."""
    m_selected = b_value > boundary
    tie_count = ties * 0
    if ties > 0:
        m_tie = b_value == boundary
        b_tie_rank, tie_count = ranks(m_tie, SIZE)
        m_selected = m_selected | (m_tie & (b_tie_rank < ties))
    b_rank, count = ranks(m_selected, SIZE)
    return m_selected, b_rank, count, tie_count
