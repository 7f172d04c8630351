"""Largest attention logit of each head, for logging and for qk-clip."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_attention.token_layout import TokenLayout

_TILE_BYTES = 2**28


@torch.no_grad()
def largest_logits(query: Tensor, key: Tensor, scale: float, tokens: TokenLayout) -> Tensor:
    """max over queries and their causal keys of q.k * scale, query rows tiled so that logits stay within 256 MiB.

    Args:
        query, key: `[S, B, n, Dq]`, packed `[T, n, Dq]`; under context parallelism query has the rank's rows.
        scale: factor on q.k.
        tokens: the layout; masked keys, other sequences and rows without a token do not count.

    Returns:
        fp32 `[n]` (fp64 for fp64 input); -inf where there is no token.
    """
    sequence = None  # of each key; -1 for a row without a token
    if tokens.packed is not None:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        sequence, _ = tokens.packed.sequence_of_row(tokens.key_rows)
        keep = tokens.keys.token_rows()
        if keep is not None:
            sequence = torch.where(keep, sequence, -1)
    rows, batch, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key.to(wide)
    key_row = torch.arange(key.shape[0], device=query.device)
    index = tokens.row_index()
    row = key_row if index is None else index
    tile = max(1, _TILE_BYTES // max(1, batch * heads * key.shape[0] * wide.itemsize))
    largest = torch.full((heads,), -torch.inf, dtype=wide, device=query.device)
    for start in range(0, rows, tile):
        here = slice(start, min(start + tile, rows))
        logits = torch.einsum("sbnd,tbnd->bnst", query[here].to(wide), key) * scale
        masked = row[here, None] < key_row
        if sequence is not None:
            own = sequence[row[here], None]
            masked = masked | (own != sequence) | (own < 0)
        if tokens.attention_mask is not None:
            mask = tokens.attention_mask
            masked = masked | (mask[..., here, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask)
        largest = torch.maximum(largest, logits.masked_fill(masked, -torch.inf).amax((0, 2, 3)))
    return largest
