"""From a forward's arguments to the layout of its tokens: checked, and gathered where each rank knows its own only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_attention.argument_checks import check_kind
from mla_attention.forward_checks import check_combination, check_hidden_states, check_same_device
from mla_attention.latent_cache import LatentCache
from mla_attention.packed import PackedSeqParams
from mla_attention.rotary import LONGEST_TABLE
from mla_attention.token_layout import TokenLayout, row_positions
from mla_attention.zigzag import check_divisible, key_order

if TYPE_CHECKING:
    from mla_attention.attention import MLASelfAttention


def lay_out_tokens(
    layer: MLASelfAttention,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    packed: PackedSeqParams | None,
    position_ids: Tensor | None,
    cache: LatentCache | None,
) -> TokenLayout:
    """The layout of the rows inside the head-sharded region, and of their keys.

    Args:
        layer: whose config, ranks, rotary tables and core attention they meet.
        hidden_states, attention_mask, packed, position_ids, cache: as the layer's forward takes them.

    Raises:
        ValueError: for whatever a forward refuses, naming the argument, what was given and what is allowed.
    """
    comm = layer.comm
    check_kind("hidden_states", hidden_states, Tensor, required=True)
    check_kind("attention_mask", attention_mask, Tensor)
    check_kind("packed_seq_params", packed, PackedSeqParams)
    check_kind("position_ids", position_ids, Tensor)
    check_kind("cache", cache, LatentCache)
    check_hidden_states(hidden_states, layer.config.hidden_size, layer.linear_kv_down_proj.weight)
    device, batch = hidden_states.device, hidden_states.shape[1]
    check_same_device("attention_mask", attention_mask, device)
    check_same_device("position_ids", position_ids, device)
    check_same_device("cache", None if cache is None else cache.keys, device)
    comm.check_alike(hidden_states)
    rows = comm.rows_after_gather(hidden_states.shape[0])
    key_rows, cp_size = rows * comm.cp_size, comm.cp_size
    first = 0
    if cache is not None:
        cache.check(rows, batch, layer.config)
        first = cache.length
    check_combination(attention_mask, packed, cache, layer.config, batch, rows, cp_size)
    if packed is not None:
        packed.check_rows(key_rows, device)
    check_divisible("hidden_states", key_rows, cp_size, packed)
    layer.core_attention.check(device, packed=packed is not None, cp_size=cp_size)

    order = None if cp_size == 1 else key_order(key_rows, cp_size, packed, device)
    positions = key_positions = None
    length = first + key_rows if packed is None else max(packed.longest_within(key_rows), 1)  # padding may read row 0
    if position_ids is not None:
        positions = _row_positions(layer, position_ids, hidden_states, rows, packed is not None)
        key_positions = _by_row(positions, rows, lambda p: comm.to_all_keys(p, order=order))
        length = max(length, _largest(key_positions) + 1)
    elif first:
        positions = torch.arange(first, first + rows, device=device)
    batch = 1 if packed is not None else batch
    cos, sin = layer.rotary.cos_sin(length, device=device)
    if cp_size == 1:
        return TokenLayout(batch, rows, cos, sin, packed, positions, attention_mask)
    # of the keys of all ranks; with a cp_comm_type each rank's keys are its own rows
    keys = None if comm.cp_comm_type else TokenLayout(batch, key_rows, cos, sin, packed, key_positions)
    if packed is None and positions is None:
        cos, sin = layer.rotary.cos_sin(length, device=device, cp_rank=comm.cp_rank, cp_size=cp_size)
    return TokenLayout(
        batch, rows, cos, sin, packed, positions, None, comm.cp_rank, cp_size, gathered=keys, order=order
    )


def _largest(positions: Tensor) -> int:
    """The largest position, -1 where there is none to read; both ends are read in one synchronisation."""
    if not positions.numel() or positions.is_meta:
        return -1
    lowest, highest = torch.stack(positions.aminmax()).tolist()
    if lowest < 0:
        raise ValueError(f"position_ids: given {lowest}, allowed are integers >= 0")
    if highest >= LONGEST_TABLE:
        raise ValueError(f"position_ids: given {highest}, allowed are positions below {LONGEST_TABLE}")
    return highest


def _row_positions(
    layer: MLASelfAttention, position_ids: Tensor, hidden_states: Tensor, rows: int, packed: bool
) -> Tensor:
    """Rotary positions of all rows of the head-sharded region, given for these or for the rank's hidden states."""
    given, batch = hidden_states.shape[:2]
    if given == rows or position_ids.shape[-1:] != (given,):
        return row_positions(position_ids, rows, batch, packed)
    own = row_positions(position_ids, given, batch, packed)
    return _by_row(own, given, layer.comm.to_every_rank)


def _by_row(positions: Tensor, rows: int, gather: Callable[[Tensor], tuple[Tensor, ...]]) -> Tensor:
    """Positions `[rows]` or `[rows * B]` gathered as rows."""
    return gather(positions.view(rows, positions.numel() // rows))[0].flatten() if rows else positions
