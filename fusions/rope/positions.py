"""Which table row a token uses, inside a kernel: the rules of `positions_reference.py`.

A sequence is found by a search in the global offsets. With context parallelism the local offset of entry c is
c // cp_size, and c // cp_size <= t exactly when c < (t + 1) * cp_size, so that the search itself divides nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BY_ROW = tl.constexpr(0)  # sbhd: position = token // B
PACKED = tl.constexpr(1)  # offset within the sequence
PACKED_ZIGZAG = tl.constexpr(2)  # the same under context parallelism
BY_ID = tl.constexpr(3)  # position_ids[token], or [token // B] when they are per s

BLOCK_PIVOTS = tl.constexpr(32)  # offsets that each token of a block is compared with at once

# Arguments that grow with the batch: Triton would otherwise compile again when they are 1 or a multiple of 16.
NOT_SPECIALIZED = [
    "n_tokens",
    "batch",
    "tokens_per_row",
    "n_sequences",
    "search_steps",
    "table_rows",
    "cp_rank",
    "cp_size",
]


@triton.jit
def _find_sequence(o_token, p_offsets, n_sequences, search_steps, cp_size, SINGLE: tl.constexpr):
    """Last sequence that starts at or before each token; n_sequences itself for rows past the end.

    One load of evenly spaced offsets narrows the search to the sequences between two of them, which are then bisected,
    a dependent load a step: up to 127 sequences are found at once for a single token, up to 31 for a block of them.
    """
    PIVOTS: tl.constexpr = 128 if SINGLE else BLOCK_PIVOTS
    first_not_before = (o_token.to(tl.int64) + 1) * cp_size
    span = (n_sequences + PIVOTS) // PIVOTS
    o_pivot = tl.arange(0, PIVOTS) * span
    m_pivot = o_pivot <= n_sequences
    starts = tl.load(p_offsets + o_pivot, mask=m_pivot, other=0).to(tl.int64)
    if SINGLE:
        low = (tl.sum((m_pivot & (starts < first_not_before)).to(tl.int32), 0) - 1) * span
        high = tl.minimum(low + span, n_sequences + 1)
        while high - low > 1:
            middle = (low + high) // 2
            starts_before = tl.load(p_offsets + middle).to(tl.int64) < first_not_before
            low = tl.where(starts_before, middle, low)
            high = tl.where(starts_before, high, middle)
    else:
        m_before = m_pivot[None, :] & (starts[None, :] < first_not_before[:, None])
        low = (tl.sum(m_before.to(tl.int32), 1) - 1) * span
        high = tl.minimum(low + span, n_sequences + 1)
        step = 0
        while step < search_steps:  # (the interpreter cannot take the length of a range from an argument)
            middle = (low + high) // 2
            starts_before = tl.load(p_offsets + middle).to(tl.int64) < first_not_before
            low = tl.where(starts_before, middle, low)
            high = tl.where(starts_before, high, middle)
            step += 1
    return low


@triton.jit
def _sequence_range(p_offsets, sequence, n_sequences, cp_size, POSITIONS: tl.constexpr):
    """Local start and end of sequences; both the last offset past the last one."""
    start = tl.load(p_offsets + sequence).to(tl.int64)
    end = tl.load(p_offsets + tl.minimum(sequence + 1, n_sequences)).to(tl.int64)
    if POSITIONS == PACKED_ZIGZAG:
        start = start // cp_size
        end = end // cp_size
    return start, end


@triton.jit
def _packed_position(o_token, sequence, start, end, n_sequences, cp_rank, cp_size, POSITIONS: tl.constexpr):
    """Position within its sequence of each token, from the sequence's local start and end; 0 past the last sequence."""
    offset = o_token - start
    if POSITIONS == PACKED_ZIGZAG:
        first = (end - start + 1) // 2
        second = end - start - first
        late = offset - first + cp_size * first + (cp_size - cp_rank - 1) * second
        offset = tl.where(offset < first, offset + cp_rank * first, late)
    return tl.where(sequence < n_sequences, offset, 0)


@triton.jit
def block_positions(
    i_token,
    o_token,
    m_token,
    n_tokens,
    tokens_per_row,
    p_offsets,
    n_sequences,
    search_steps,
    cp_rank,
    cp_size,
    p_ids,
    POSITIONS: tl.constexpr,
    REACH: tl.constexpr,
):
    """Table rows (int64) of a block of int32 tokens i_token .. i_token + REACH; `tokens_per_row` tokens share a row.

    The sequence of the first token is looked for alone. Where it holds the whole block, as almost always, that is all;
    else each token is looked for.
    """
    if POSITIONS == BY_ROW:
        if REACH == 0:
            position = (i_token // tokens_per_row).to(tl.int64) + (o_token * 0).to(tl.int64)
        else:
            position = (o_token // tokens_per_row).to(tl.int64)
    elif POSITIONS == BY_ID:
        if REACH == 0:
            position = tl.load(p_ids + i_token // tokens_per_row, mask=i_token < n_tokens, other=0).to(tl.int64)
            position += (o_token * 0).to(tl.int64)
        else:
            position = tl.load(p_ids + o_token // tokens_per_row, mask=m_token, other=0).to(tl.int64)
    else:
        sequence = _find_sequence(i_token, p_offsets, n_sequences, search_steps, cp_size, True)
        start, end = _sequence_range(p_offsets, sequence, n_sequences, cp_size, POSITIONS)
        position = _packed_position(
            o_token.to(tl.int64), sequence, start, end, n_sequences, cp_rank, cp_size, POSITIONS
        )
        if REACH > 0:  # noqa: SIM102 (known to the compiler, unlike what follows)
            if i_token + REACH >= end:  # past the last sequence too, where start and end are the last offset
                o_sequence = _find_sequence(o_token, p_offsets, n_sequences, search_steps, cp_size, False)
                o_start, o_end = _sequence_range(p_offsets, o_sequence, n_sequences, cp_size, POSITIONS)
                position = _packed_position(
                    o_token.to(tl.int64), o_sequence, o_start, o_end, n_sequences, cp_rank, cp_size, POSITIONS
                )
    return position


def position_arguments(
    token_shape: torch.Size, cu_seqlens: Tensor | None, cp_rank: int, cp_size: int, position_ids: Tensor | None
) -> tuple[dict[str, Any], int]:
    """Kernel arguments that say where tokens `(S, B)` or `(T,)` lie in the tables.

    Returns:
        keyword arguments of a kernel, and the rule (BY_ROW, PACKED, PACKED_ZIGZAG or BY_ID).
    """
    tokens_per_row = token_shape[1] if len(token_shape) == 2 else 1
    arguments: dict[str, Any] = {
        "tokens_per_row": tokens_per_row,
        "p_offsets": None,
        "n_sequences": 0,
        "search_steps": 0,
        "cp_rank": 0,
        "cp_size": 1,
        "p_ids": None,
    }
    if position_ids is not None:
        arguments["p_ids"] = position_ids.contiguous()
        if position_ids.shape[0] != token_shape[0]:
            arguments["tokens_per_row"] = 1
        return arguments, BY_ID.value
    if cu_seqlens is None:
        return arguments, BY_ROW.value
    n_sequences = cu_seqlens.shape[0] - 1
    arguments |= {
        "p_offsets": cu_seqlens.contiguous(),
        "n_sequences": n_sequences,
        "search_steps": (n_sequences // BLOCK_PIVOTS.value).bit_length(),
        "cp_rank": cp_rank,
        "cp_size": cp_size,
    }
    return arguments, (PACKED if cp_size == 1 else PACKED_ZIGZAG).value
