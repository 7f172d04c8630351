"""Index tensors: which keys a query may see, and what a caller's `topk_indices` have to be.

Everywhere int64 `[B, S, k]` (packed `[1, T, k]`): key rows on the sequence axis, -1 in slots without a key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mla_attention.argument_checks import check_kind
from mla_attention.fusions.dsa.key_ranges import key_ranges
from mla_attention.fusions.host_checks import values_are_validated
from mla_attention.token_layout import TokenLayout


def query_positions(tokens: TokenLayout, first: int, device: torch.device) -> Tensor | None:
    """Place of each query row on the key axis, int64 `[rows]`; None where queries and keys are the same rows.

    Under context parallelism the keys are those of all ranks in global order.

    Args:
        tokens: layout of the query rows.
        first: keys that a cache holds before them.
        device: where the result lies.
    """
    return torch.arange(first, first + tokens.rows, device=device) if first else tokens.row_index()


def visible_keys(
    tokens: TokenLayout, num_keys: int, positions: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(begin, end), int32 `[rows]`: query row r may see the keys begin[r] .. end[r]-1; none where it holds no token.

    Args:
        tokens: layout of the query rows.
        num_keys: length of the key axis.
        positions: place of each query row on the key axis, or None where they are the same rows.
        device: where the result lies.
    """
    begin, end = key_ranges(tokens.rows, num_keys, device=device, cu_seqlens=tokens.cu_seqlens, q_positions=positions)
    keep = tokens.token_rows()
    return begin, end if keep is None else torch.where(keep, end, begin)


def all_visible(visible: tuple[Tensor, Tensor], width: int, batch_size: int) -> Tensor:
    """Int64 `[B, rows, width]`: all keys that each row may see, ascending, then -1."""
    begin, end = (t.long()[:, None] for t in visible)
    key = begin + torch.arange(width, device=begin.device)
    return torch.where(key < end, key, -1).expand(batch_size, -1, -1)


def only_visible(indices: Tensor, visible: tuple[Tensor, Tensor]) -> Tensor:
    """`indices` `[B, rows, k]` as int64, -1 in place of keys that the row may not see."""
    begin, end = (t[:, None] for t in visible)
    return torch.where((indices >= begin) & (indices < end), indices, -1).long()


def with_width(indices: Tensor, width: int) -> Tensor:
    """`indices` `[.., k]` cut, or filled with -1, to `width` slots; the slots cut off must be unused ones."""
    return F.pad(indices, (0, width - indices.shape[-1]), value=-1)


def check_topk_indices(topk_indices: Tensor, tokens: TokenLayout) -> None:
    """Refuse a caller's indices of a wrong shape, dtype or device.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    check_kind("topk_indices", topk_indices, Tensor)
    if topk_indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_indices: given dtype {topk_indices.dtype}, allowed are torch.int32 and torch.int64")
    batch, rows = tokens.batch_size, tokens.rows
    if topk_indices.dim() != 3 or topk_indices.shape[:2] != (batch, rows):
        layout = "[1, T, k]" if tokens.packed is not None else "[B, S, k]"
        raise ValueError(
            f"topk_indices: given shape {list(topk_indices.shape)}, allowed is {layout} = [{batch}, {rows}, k]"
        )
    if topk_indices.device.type != tokens.cos.device.type:
        raise ValueError(
            f"topk_indices: given on {topk_indices.device}, allowed is the device of hidden_states, {tokens.cos.device}"
        )


def check_index_values(topk_indices: Tensor, visible: tuple[Tensor, Tensor], num_keys: int) -> None:
    """Under MLA_ATTENTION_VALIDATE=1, refuse indices that name no key, a key that the query may not see, or one twice.

    Raises:
        ValueError: naming the first offending entry and what is allowed.
    """
    if not values_are_validated() or topk_indices.numel() == 0:
        return
    begin, end = (t[:, None] for t in visible)
    outside = (topk_indices < -1) | (topk_indices >= num_keys)
    if outside.any():
        b, row, slot = outside.nonzero()[0].tolist()
        raise ValueError(
            f"topk_indices: given {int(topk_indices[b, row, slot])} at [{b}, {row}, {slot}], "
            f"allowed are -1 and key rows 0..{num_keys - 1}"
        )
    unseen = (topk_indices >= 0) & (end > begin) & ((topk_indices < begin) | (topk_indices >= end))
    if unseen.any():
        b, row, slot = unseen.nonzero()[0].tolist()
        raise ValueError(
            f"topk_indices: given {int(topk_indices[b, row, slot])} at [{b}, {row}, {slot}], allowed are -1 and the "
            f"keys up to the query in its sequence, {int(begin[row, 0])}..{int(end[row, 0]) - 1}"
        )
    ordered = topk_indices.sort(dim=-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if repeated.any():
        b, row, slot = repeated.nonzero()[0].tolist()
        raise ValueError(
            f"topk_indices: given {int(ordered[b, row, slot])} twice at [{b}, {row}], allowed are distinct keys and -1"
        )
