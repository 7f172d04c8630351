"""Core attention through torch.nn.functional.scaled_dot_product_attention.

On a GPU the kernels are tried in the order cuDNN, flash, memory-efficient, math. V may be a strided view: cuDNN reads
it where it lies. Packed sequences are attended one after the other, from the lengths that the host knows.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla_attention.core_attention.eager import causal_mask
from mla_attention.core_attention.interface import CoreAttention, by_sequence, no_attention, with_contiguous_gradient
from mla_attention.core_attention.zigzag import attend_chunks, attend_with_cudnn, cudnn_serves
from mla_attention.token_layout import TokenLayout

_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class SDPAttention(CoreAttention):
    """scaled_dot_product_attention on `[B, n, S, D]` views."""

    name = "sdpa"
    context_parallel = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        if query.shape[0] == 0:
            return no_attention(query, key, value)
        if tokens.cp_size > 1 and not self.dropout_now and cudnn_serves(query, key, value):
            return attend_with_cudnn(query, key, value, tokens, self.scale)
        with sdpa_kernel(_ORDER, set_priority=True) if query.is_cuda else nullcontext():
            return with_contiguous_gradient(self._attend_rows(query, key, value, tokens))

    def _attend_rows(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        if tokens.cp_size > 1:
            return attend_chunks(query, key, value, tokens, self._attend_chunk)
        if tokens.packed is None:
            return self._attend(query, key, value, tokens.attention_mask)
        if tokens.packed.host_offsets is None:
            raise ValueError(
                "packed_seq_params: built with validate=False, but core_attention_backend 'sdpa' needs the lengths "
                "on the host; allowed are validate=True, or the backends 'varlen', 'flex' and 'reference'"
            )
        holds_scores = not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16)
        attend = partial(self._attend, attention_mask=None)
        return by_sequence(query, key, value, tokens.packed, attend, holds_scores=holds_scores)

    def _attend_chunk(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the rows of the last keys."""
        before = key.shape[0] - query.shape[0]
        if before == 0:
            return self._attend(query, key, value, None)
        allowed = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device).tril(before)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return self._scaled(q, k, v, allowed).permute(2, 0, 1, 3)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [B, n, S, D]
        allowed = none_left = None
        if attention_mask is not None:
            masked = attention_mask | causal_mask(query.shape[2], query.device)
            none_left = masked.all(-1, keepdim=True)
            allowed = ~masked | none_left  # a row with no key attends to all, and is zeroed below: never NaN
        output = self._scaled(query, key, value, allowed)
        if none_left is not None:
            output = torch.where(none_left, 0.0, output)
        return output.permute(2, 0, 1, 3)

    def _scaled(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        """`[B, n, S, Dv]`, causal where no mask says what is allowed."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            dropout_p=self.dropout_now,
            is_causal=allowed is None,
            scale=self.scale,
        )
