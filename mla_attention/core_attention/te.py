"""Core attention through Transformer Engine's DotProductAttention, whose kernels are cuDNN's (or flash attention's).

`[S, B]` runs as sbhd with the causal mask, packed sequences as thd with padding_causal. Padding rows lie behind the
tokens of their sequence, where causality hides them, so the padded offsets serve as they are.

One combination is refused: thd with a head dim above 192 on cuDNN below 9.19. On an H200 with Transformer Engine
2.20.2, cuDNN 9.14 gave a right output and gradients wrong by 7e-2 for 256/256, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mla_attention.core_attention.interface import CoreAttention, describe, rows_outside
from mla_attention.layers.te_import import import_te, te_obstacle, te_version
from mla_attention.token_layout import TokenLayout

_LARGEST_PACKED_DIM = 192  # of thd on cuDNN older than:
_CUDNN_FOR_WIDE_PACKED = (9, 19)
_NO_BACKEND = "No dot product attention backend"  # how Transformer Engine's own error starts


class TEAttention(CoreAttention):
    """`te.pytorch.DotProductAttention` on `[S, B, n, D]` and `[T, n, D]`; its module is built at the first forward.

    That module has no parameters and stays out of the module tree: nothing of it is in a state dict, a copy or a
    pickle.
    """

    name = "te"

    def __init__(self, qk_dim: int, v_dim: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(qk_dim, v_dim, scale, dropout)
        self._built: dict[tuple, nn.Module] = {}

    def refusal(self, device: torch.device, *, packed: bool) -> str | None:
        reason = te_obstacle()
        if reason is not None:
            return reason
        if device.type != "cuda":
            return "allowed are CUDA devices"
        cudnn = cudnn_version()
        if packed and max(self.qk_dim, self.v_dim) > _LARGEST_PACKED_DIM and cudnn < _CUDNN_FOR_WIDE_PACKED:
            needed = ".".join(map(str, _CUDNN_FOR_WIDE_PACKED))
            return (
                f"Transformer Engine has loaded cuDNN {_dotted(cudnn)}, whose gradients are wrong for packed sequences "
                f"with head dims above {_LARGEST_PACKED_DIM}; allowed is cuDNN {needed} or newer"
            )
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        if tokens.attention_mask is not None:
            raise ValueError(
                "attention_mask: given with core_attention_backend 'te'; allowed is None, or 'sdpa', 'reference'"
            )
        if query.shape[0] == 0:
            return value
        packed = tokens.packed
        if packed is None:
            return self._attend(query, key, value, qkv_format="sbhd", attn_mask_type="causal")
        nowhere = torch.ones((), dtype=torch.bool, device=value.device)
        if packed.num_sequences == 0 or packed.longest_rows == 0:
            return value.masked_fill(nowhere, 0)
        outside = rows_outside(tokens)
        if outside is not None:
            query, key, value = (t.masked_fill(outside, 0) for t in (query, key, value))
        offsets = packed.row_offsets.to(torch.int32)
        output = self._attend(
            query,
            key,
            value,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=packed.longest_rows,
            max_seqlen_kv=packed.longest_rows,
        )
        return output if outside is None else output.masked_fill(outside, 0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        query, key, value = (t.contiguous() for t in (query, key, value))  # separate heads: its one layout for MLA
        try:
            output = self._module(query.shape[-2])(query, key, value, **how)
        except ValueError as error:
            if not str(error).startswith(_NO_BACKEND):
                raise
            raise ValueError(
                f"core_attention_backend: given 'te', but Transformer Engine {te_version()} with cuDNN "
                f"{_dotted(cudnn_version())} has no kernel for qk dim {self.qk_dim}, v dim {self.v_dim}, "
                f"{how['qkv_format']}, {query.dtype} on {describe(query.device)}; allowed are 'auto', 'sdpa' and others"
            ) from error
        return output.view(*query.shape[:-1], self.v_dim)

    def _module(self, heads: int) -> nn.Module:
        """The module for this many heads, and for the dropout and the determinism that hold now."""
        key = (heads, self.dropout_now, torch.are_deterministic_algorithms_enabled())
        if key not in self._built:
            self._built[key] = import_te().DotProductAttention(
                heads, (self.qk_dim, self.v_dim), attention_dropout=self.dropout_now, softmax_scale=self.scale
            )
        return self._built[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_built": {}}


def cudnn_version() -> tuple[int, ...]:
    """Version of the cuDNN that Transformer Engine has loaded, which need not be torch's."""
    return tuple(import_te().get_cudnn_version())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
