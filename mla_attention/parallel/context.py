"""Sequences to context-parallel shards and back, by the zigzag layout of `mla_attention.zigzag`."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mla_attention.argument_checks import check_int, check_kind
from mla_attention.packed import PackedSeqParams
from mla_attention.parallel.collectives import gather_same_rows
from mla_attention.zigzag import check_divisible, key_order, rows_of_rank


def shard_sequence_for_cp(
    t: Tensor, cp_rank: int, cp_size: int, *, dim: int = 0, packed_seq_params: PackedSeqParams | None = None
) -> Tensor:
    """The rows of a whole sequence axis that a context-parallel rank holds: chunks r and 2*cp-1-r of each sequence.

    Args:
        t: any tensor whose axis `dim` is the sequence axis: hidden states, labels, position ids.
        cp_rank, cp_size: the shard.
        dim: the sequence axis.
        packed_seq_params: global offsets; each sequence is cut by itself, its padding included.

    Returns:
        `t` with the axis `dim` cp_size times shorter, a copy; differentiable. `t` itself for one rank.

    Raises:
        ValueError: for a length that is no multiple of 2*cp_size, naming both, or a rank outside the size.

    Source: the layout of Megatron-LM's and Transformer Engine's context parallelism.
    """
    check_int("cp_size", cp_size, 1)
    check_int("cp_rank", cp_rank, 0)
    if cp_rank >= cp_size:
        raise ValueError(f"cp_rank: given {cp_rank}, allowed are 0..{cp_size - 1} (cp_size is {cp_size})")
    rows = _length(t, dim, packed_seq_params)
    if cp_size == 1:
        return t
    _check_rows(rows, cp_size, packed_seq_params)
    mine = rows_of_rank(rows, cp_rank, cp_size, packed_seq_params, t.device)
    return t.index_select(dim, mine.to(t.device))


def gather_sequence_from_cp(
    t: Tensor, group: ProcessGroup, *, dim: int = 0, packed_seq_params: PackedSeqParams | None = None
) -> Tensor:
    """The whole sequence axis in global order from each rank's shard: undoes `shard_sequence_for_cp`.

    Differentiable for what every rank computes alike from the result: of the gradient, each rank keeps its own rows.

    Args:
        t: this rank's shard.
        group: the context-parallel group; all its ranks must call.
        dim: the sequence axis.
        packed_seq_params: global offsets, where the sequences are packed.

    Returns:
        `t` with the axis `dim` as many times longer as the group has ranks.

    Raises:
        ValueError: for shards that make no whole length, naming it and 2*cp_size.
    """
    length = _length(t, dim, packed_seq_params)
    check_kind("group", group, ProcessGroup)
    cp_size = dist.get_world_size(group)
    if cp_size == 1:
        return t
    rows = length * cp_size
    _check_rows(rows, cp_size, packed_seq_params)
    order = key_order(rows, cp_size, packed_seq_params, t.device)
    return gather_same_rows(t.movedim(dim, 0), group, order).movedim(0, dim)


def _length(t: Tensor, dim: int, packed: PackedSeqParams | None) -> int:
    """Length of the axis `dim`, once these are what they are said to be."""
    check_kind("t", t, Tensor, required=True)
    check_kind("packed_seq_params", packed, PackedSeqParams)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -t.ndim <= dim < t.ndim:
        raise ValueError(f"dim: given {dim!r}, allowed are the dims of t, which has shape {list(t.shape)}")
    return t.shape[dim]


def _check_rows(rows: int, cp_size: int, packed: PackedSeqParams | None) -> None:
    check_divisible("t", rows, cp_size, packed)
    if packed is not None and packed.host_offsets is not None and packed.host_offsets[-1] > rows:
        end = packed.host_offsets[-1]
        raise ValueError(f"packed_seq_params: offsets end at {end}, allowed is at most the {rows} rows of t")
