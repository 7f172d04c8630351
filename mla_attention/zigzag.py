"""Which rows a context-parallel rank holds, and how the rows of all ranks lie in global order.

A sequence of length L is cut into 2*cp chunks of L/(2*cp) rows; rank r holds the chunks r and 2*cp-1-r, in this order,
so that every rank has the same causal work. A pack is cut sequence by sequence, padding included; the rows past its
last offset are dealt out in rank order.

    cp = 2, lengths 8 and 16 packed: rank 0 holds [0,1,6,7 | 8,9,10,11,20,21,22,23], rank 1 [2,3,4,5 | 12 .. 19]

Source: the layout of Megatron-LM's and Transformer Engine's context parallelism.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mla_attention.packed import PackedSeqParams


class KeyOrder(NamedTuple):
    """The permutation between the rows of all ranks, one rank after the other, and global order.

    Attributes:
        rows: int64 `[T]`, global row of each gathered row.
        places: int64 `[T]`, its inverse: the gathered row that is each global row.
    """

    rows: Tensor
    places: Tensor


def check_divisible(name: str, rows: int, cp_size: int, packed: PackedSeqParams | None = None) -> None:
    """Refuse a sequence that does not fall into 2*cp equal chunks. (Lengths that only the device knows are not seen.)

    Args:
        name: of the argument, for the message.
        rows: global length of the sequence axis.
        cp_size: context-parallel ranks.
        packed: offsets of the sequences, padding included.

    Raises:
        ValueError: naming the length and 2*cp.
    """
    if cp_size == 1:
        return
    allowed = f"allowed are multiples of 2*cp = {2 * cp_size}"
    if packed is None:
        if rows % (2 * cp_size):
            raise ValueError(f"{name}: given a sequence of length {rows}, {allowed}")
        return
    if rows % cp_size:
        raise ValueError(f"{name}: given {rows} rows, allowed are multiples of cp = {cp_size}")
    if packed.host_offsets is None:
        return
    for i, (start, end) in enumerate(pairwise(packed.host_offsets)):
        if (end - start) % (2 * cp_size):
            raise ValueError(
                f"packed_seq_params: sequence {i} has length {end - start}, {allowed} "
                "(or cu_seqlens_q_padded with such lengths)"
            )


def rows_of_rank(rows: int, cp_rank: int, cp_size: int, packed: PackedSeqParams | None, device: torch.device) -> Tensor:
    """Global row of each row that a rank holds, int64 `[rows / cp_size]`, without a device sync.

    Args:
        rows: global length of the sequence axis.
        cp_rank, cp_size: the shard.
        packed: offsets of the sequences, or None for one sequence.
        device: where the result lies; for a pack the device of its offsets.
    """
    if packed is None:
        length = rows // (2 * cp_size)
        first = torch.arange(length, device=device)
        return torch.cat([first + cp_rank * length, first + (2 * cp_size - 1 - cp_rank) * length])
    starts = packed.row_offsets.to(torch.int64)
    bounds = starts // cp_size  # local start rows
    row = torch.arange(rows // cp_size, device=starts.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), row, right=True)  # the pack's last index + 1: in no sequence
    inside = sequence < packed.num_sequences
    offset = row - bounds[sequence]
    chunk = torch.where(inside, bounds.diff(append=bounds[-1:])[sequence] // 2, 0)
    late = offset + (2 * cp_size - 2 - cp_rank) * chunk
    offset = torch.where(offset < chunk, offset + cp_rank * chunk, late)
    outside = row - bounds[-1] + cp_rank * (rows // cp_size - bounds[-1])
    return starts[sequence] + torch.where(inside, offset, outside)


def key_order(rows: int, cp_size: int, packed: PackedSeqParams | None, device: torch.device) -> KeyOrder:
    """The permutation that brings gathered rows into global order; a pack keeps it for all layers.

    Args:
        rows: global length of the sequence axis.
        cp_size: ranks that were gathered from.
        packed: offsets of the sequences, or None for one sequence.
        device: where the result lies.
    """
    key = (rows, cp_size, device)
    if packed is not None and key in packed.key_orders:
        return packed.key_orders[key]
    gathered = torch.cat([rows_of_rank(rows, rank, cp_size, packed, device) for rank in range(cp_size)])
    places = torch.empty_like(gathered)
    places[gathered] = torch.arange(rows, device=gathered.device)
    order = KeyOrder(gathered, places)
    if packed is not None and packed.host_offsets is not None:  # others may be rewritten in place
        packed.key_orders[key] = order
    return order
