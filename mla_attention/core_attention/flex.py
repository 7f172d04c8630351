"""Core attention through torch.nn.attention.flex_attention, compiled on CUDA.

One block mask serves causality, packing and the attention mask. Forward only on a CPU (torch has no backward there).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mla_attention.core_attention.interface import CoreAttention, no_attention
from mla_attention.token_layout import TokenLayout


class FlexAttention(CoreAttention):
    """flex_attention on `[B, n, S, D]` views; packed sequences are one row of documents."""

    name = "flex"
    context_parallel = True

    def refusal(self, device: torch.device, *, packed: bool) -> str | None:
        if self.dropout:
            return "allowed is attention_dropout 0"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        if query.shape[0] == 0:
            return no_attention(query, key, value)
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if query.device.type == "cpu" and needs_gradient:
            raise ValueError(
                "core_attention_backend: given 'flex' on a CPU with gradients; "
                "allowed are 'sdpa', 'reference', or no_grad"
            )
        if tokens.packed is not None:
            query, key, value = query[:, None], key[:, None], value[:, None]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        attend = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
        output = attend(query, key, value, block_mask=self._block_mask(tokens, query.device), scale=self.scale)
        output = output.permute(2, 0, 1, 3)
        return output[:, 0] if tokens.packed is not None else output

    def _block_mask(self, tokens: TokenLayout, device: torch.device) -> BlockMask:
        batch, rows = None, tokens.rows
        if tokens.cp_size > 1:
            row = cast(Tensor, tokens.row_index())  # there is one under context parallelism
            sequence = torch.zeros(tokens.key_rows, dtype=torch.int64, device=device)
            if tokens.packed is not None:
                sequence, _ = tokens.packed.sequence_of_row(tokens.key_rows)

            def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (row[q] >= k) & (sequence[row[q]] == sequence[k])

        elif tokens.packed is not None:
            sequence, _ = tokens.packed.sequence_of_row(rows)

            def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & (sequence[q] == sequence[k])

        elif tokens.attention_mask is not None:
            batch = tokens.batch_size
            masked = tokens.attention_mask.expand(batch, 1, rows, rows)

            def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & ~masked[b, 0, q, k]

        else:

            def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return q >= k

        return create_block_mask(allowed, batch, None, rows, tokens.key_rows, device=device)
