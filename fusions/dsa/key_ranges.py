"""Which keys a query row may see: one contiguous range, begin[t] <= key < end[t].

    position(t) = q_positions[t], or t
    begin(t)    = start of the sequence that holds position(t), or 0 without cu_seqlens
    end(t)      = position(t) + 1, at most S

A position below 0, or past the last offset of cu_seqlens, sees nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def key_ranges(
    num_rows: int,
    num_keys: int,
    *,
    device: torch.device,
    cu_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Range of allowed keys of each query row; no device sync.

    Args:
        num_rows: T.
        num_keys: S.
        cu_seqlens: int [sequences + 1], offsets of the sequences in the keys.
        q_positions: int [T], index of each row in the keys' order.

    Returns:
        (begin, end), int32 [T] both; begin == end where a row sees nothing.
    """
    position = torch.arange(num_rows, device=device) if q_positions is None else q_positions.long()
    begin = torch.zeros_like(position)
    visible = position >= 0
    if cu_seqlens is not None:
        offsets = cu_seqlens.long()
        sequence = (
            torch.searchsorted(offsets, position, right=True) - 1
        )  # the last of equal offsets: never an empty sequence
        begin = offsets[sequence.clamp(0, offsets.numel() - 1)]
        visible = visible & (position < offsets[-1])
    end = torch.where(visible, (position + 1).clamp(max=num_keys), 0)
    begin = torch.where(visible, torch.minimum(begin, end), 0)
    return begin.int(), end.int()
