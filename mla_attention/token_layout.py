"""Where each row of a forward lies: its sequence, its position, its padding, its share of a parallel layout.

Built once at the start of a forward and handed to every later step, so that none of them asks about packing again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_attention.packed import PackedSeqParams
from mla_attention.zigzag import KeyOrder


@dataclass(frozen=True)
class TokenLayout:
    """The rows of queries (and, with one context-parallel rank, of keys) of one forward.

    Attributes:
        batch_size: B; 1 for packed sequences.
        rows: length of the sequence axis on this rank: S (or S/cp), packed T (or T/cp).
        cos, sin: rotary tables, fp32 `[L, 1, 1, Dr]`.
        packed: offsets of packed sequences, over the whole (not the rank's) token axis.
        position_ids: rotary position of each row, int `[rows]` or `[rows * B]` in row order, or None for the default.
        attention_mask: bool broadcastable to `[B, 1, S, S]`, True = masked, or None.
        cp_rank, cp_size: the context-parallel shard that `rows` are.
        gathered: layout of the keys where they are not the same rows: those of all context-parallel ranks in global
            order, with uncut tables; None with one rank, and where core attention exchanges the keys.
        order: the permutation that brings the rows of all context-parallel ranks into global order; None with one rank.
        key_rows: length of the key axis: rows * cp_size.
    """

    batch_size: int
    rows: int
    cos: Tensor
    sin: Tensor
    packed: PackedSeqParams | None = None
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    cp_rank: int = 0
    cp_size: int = 1
    gathered: TokenLayout | None = None
    order: KeyOrder | None = None

    @property
    def keys(self) -> TokenLayout:
        """Layout of the key axis."""
        return self if self.gathered is None else self.gathered

    @property
    def key_rows(self) -> int:
        return self.rows * self.cp_size

    @property
    def longest(self) -> int:
        """Most keys that a query can see, known on the host."""
        return self.key_rows if self.packed is None else self.packed.max_seqlen_kv

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Start rows of packed sequences for the rotary kernels (whole token axis), None for `[S, B]`."""
        return None if self.packed is None else self.packed.row_offsets

    def rope_arguments(self) -> dict:
        """Keyword arguments by which the rotary functions find each row's position."""
        return {"cp_rank": self.cp_rank, "cp_size": self.cp_size, "position_ids": self.position_ids}

    def token_rows(self) -> Tensor | None:
        """Bool `[rows]`: rows that hold a token; None where all do."""
        if self.packed is None or not self.packed.has_padding(self.key_rows):
            return None
        keep = self.packed.token_rows(self.key_rows)
        index = self.row_index()
        return keep if index is None else keep[index]

    def row_index(self) -> Tensor | None:
        """Place of each row on the key axis, int64 `[rows]`; None where they are the same rows."""
        if self.order is None:
            return None
        return self.order.rows[self.cp_rank * self.rows : (self.cp_rank + 1) * self.rows]


def without_padding(rows: Tensor, keep: Tensor | None) -> Tensor:
    """`rows` `[rows, ...]` with exact zeros, and zero gradients, where `keep` `[rows]` is False; None keeps all."""
    if keep is None:
        return rows
    return torch.where(
        keep.view(-1, *[1] * (rows.dim() - 1)), rows, torch.zeros((), dtype=rows.dtype, device=rows.device)
    )


def row_positions(position_ids: Tensor, rows: int, batch_size: int, packed: bool) -> Tensor:
    """Rotary positions in row order, from the shapes that users have.

    Args:
        position_ids: integers `[S]` or `[B, S]`; packed `[T]` or `[1, T]`.
        rows: S or T.
        batch_size: B.
        packed: whether rows are packed tokens.

    Returns:
        int `[S]` or `[S * B]` (row s*B + b), packed `[T]`.

    Raises:
        ValueError: naming the given and the allowed shapes or dtypes.
    """
    if position_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"position_ids: given dtype {position_ids.dtype}, allowed are torch.int32 and torch.int64")
    shape = tuple(position_ids.shape)
    if shape == (rows,):
        return position_ids
    if shape == (batch_size, rows):
        return position_ids[0] if batch_size == 1 else position_ids.t().reshape(-1)
    allowed = f"[{rows}]" if packed else f"[{rows}] and [{batch_size}, {rows}]"
    raise ValueError(f"position_ids: given shape {list(shape)}, allowed: {allowed}")
