"""Core attention written out: the reference of the other back ends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mla_attention.core_attention.interface import CoreAttention, by_sequence
from mla_attention.token_layout import TokenLayout


class EagerAttention(CoreAttention):
    """softmax(q k^T * scale) v by two einsums, in fp32 at least; holds all `[B, n, S, S]` weights at once."""

    name = "reference"
    context_parallel = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        if tokens.cp_size > 1:
            return self._attend_shard(query, key, value, tokens)
        if tokens.packed is None:
            masked = causal_mask(query.shape[0], query.device)
            if tokens.attention_mask is not None:
                masked = masked | tokens.attention_mask
            return self._attend(query, key, value, masked)
        if tokens.packed.host_offsets is None:
            sequence, _ = tokens.packed.sequence_of_row(tokens.rows)
            masked = causal_mask(tokens.rows, query.device) | (sequence[:, None] != sequence[None, :])
            return self._attend(query[:, None], key[:, None], value[:, None], masked)[:, 0]
        return by_sequence(query, key, value, tokens.packed, self._attend_sequences, holds_scores=True)

    def _attend_shard(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        masked = shard_mask(tokens)
        if tokens.packed is None:
            return self._attend(query, key, value, masked)
        return self._attend(query[:, None], key[:, None], value[:, None], masked)[:, 0]

    def _attend_sequences(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._attend(query, key, value, causal_mask(query.shape[0], query.device))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, masked: Tensor) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        logits = torch.einsum("sbnd,tbnd->bnst", query.to(wide), key.to(wide)) * self.scale
        weights = masked_softmax(logits, masked)
        weights = F.dropout(weights, self.dropout_now)
        return torch.einsum("bnst,tbnd->sbnd", weights, value.to(wide)).to(value.dtype)


def causal_mask(rows: int, device: torch.device) -> Tensor:
    """Bool `[rows, rows]`, True where the key lies after the query."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)


def shard_mask(tokens: TokenLayout) -> Tensor:
    """Bool `[rows, keys]` of a context-parallel shard, True where the key is later or in another sequence."""
    row = tokens.row_index()
    if row is None:
        raise ValueError(f"tokens: given cp_size {tokens.cp_size}, allowed are sizes above 1")
    masked = torch.arange(tokens.key_rows, device=row.device) > row[:, None]
    if tokens.packed is None:
        return masked
    sequence, _ = tokens.packed.sequence_of_row(tokens.key_rows)
    return masked | (sequence[row][:, None] != sequence) | (sequence == tokens.packed.num_sequences)


def masked_softmax(logits: Tensor, masked: Tensor) -> Tensor:
    """Softmax over the keys that are not masked; a row with none gives zeros, and zero gradients."""
    none_left = masked.all(-1, keepdim=True)
    logits = logits.masked_fill(masked & ~none_left, -torch.inf)
    return logits.softmax(-1).masked_fill(none_left, 0.0)
