"""Core attention of packed sequences through torch.nn.attention.varlen (flash attention, CUDA only).

The flash kernels want equal head dims, so V is padded with zeros to Dq where Dv < Dq and the output cut back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mla_attention.core_attention.interface import CoreAttention, no_attention, rows_outside
from mla_attention.core_attention.zigzag import attend_chunks
from mla_attention.token_layout import TokenLayout

_LARGEST_HEAD_DIM = 256  # of the flash kernels that torch ships
VARLEN_DTYPES = (torch.float16, torch.bfloat16)


@cache
def _argument_names(function: Callable) -> frozenset[str]:
    """Asked once: the causal and scale arguments of varlen_attn moved between torch releases."""
    return frozenset(inspect.signature(function).parameters)


class VarlenAttention(CoreAttention):
    """varlen_attn on `[T, n, D]`; an `[S, B]` batch is B sequences of length S."""

    name = "varlen"
    context_parallel = True

    def refusal(self, device: torch.device, *, packed: bool) -> str | None:
        if device.type != "cuda":
            return "allowed are CUDA devices"
        if max(self.qk_dim, self.v_dim) > _LARGEST_HEAD_DIM or self.v_dim > self.qk_dim:
            return f"allowed are v dim <= qk dim <= {_LARGEST_HEAD_DIM}"
        if self.dropout:
            return "allowed is attention_dropout 0"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        if tokens.attention_mask is not None:
            raise ValueError(
                "attention_mask: given with core_attention_backend 'varlen'; allowed is None, or 'sdpa', 'reference'"
            )
        if query.dtype not in VARLEN_DTYPES:
            raise ValueError(
                f"core_attention_backend: given 'varlen' for {query.dtype}, "
                "allowed are torch.float16 and torch.bfloat16, or 'auto', 'sdpa', 'reference'"
            )
        if query.shape[0] == 0:
            return no_attention(query, key, value)
        value = F.pad(value, (0, self.qk_dim - self.v_dim))
        if tokens.cp_size > 1:
            return attend_chunks(query, key, value, tokens, self._attend_batch)[..., : self.v_dim]
        if tokens.packed is None:
            output = self._attend_batch(query, key, value)
        else:
            offsets, longest = tokens.packed.row_offsets.to(torch.int32), tokens.packed.longest_within(tokens.key_rows)
            outside = rows_outside(tokens)
            if outside is not None:
                query, key, value = (t.masked_fill(outside, 0) for t in (query, key, value))
            output = self._attend(query, key, value, (offsets, offsets), (longest, longest))
            output = output if outside is None else output.masked_fill(outside, 0)
        return output[..., : self.v_dim]

    def _attend_batch(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[q, B, n, Dv]` of queries `[q, B, n, D]` that are the rows of the last keys `[k, B, n, D]`."""
        batch, device = query.shape[1], query.device
        lengths = [t.shape[0] for t in (query, key)]
        to_q, to_k = (torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=device) for n in lengths)
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))
        output = self._attend(q, k, v, (to_q, to_k), (lengths[0], lengths[1]))
        return output.view(batch, -1, *value.shape[2:]).transpose(0, 1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, offsets: tuple[Tensor, Tensor], longest: tuple[int, int]
    ) -> Tensor:
        """Flash attention, whose causal mask is aligned at the last row and the last key of each sequence."""
        from torch.nn.attention.varlen import varlen_attn

        names = _argument_names(varlen_attn)
        how: dict = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
        if "scale" in names:
            how["scale"] = self.scale
        else:
            query = query * (self.scale * self.qk_dim**0.5)
        output = varlen_attn(query, key.contiguous(), value.contiguous(), *offsets, *longest, **how)
        return output if isinstance(output, Tensor) else output[0]
