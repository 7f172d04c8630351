"""Core attention through Transformer Engine's DotProductAttention, whose kernels are cuDNN's (or flash attention's).

`[S, B]` runs as sbhd with the causal mask, packed sequences as thd with padding_causal. Padding rows lie behind the
tokens of their sequence, where causality hides them, so the padded offsets serve as they are.

Under context parallelism Transformer Engine exchanges keys and values itself, by `cp_comm_type`. Its ranks hold the
rows that ours do (`mla_attention.zigzag`), sbhd and thd: chunks r and 2*cp-1-r of each sequence. Offsets and longest
length are those of the whole. It is not shown rows past the last offset: it would count them to the last sequence.

    p2p         keys and values of all heads go round a ring while each rank attends; any number of heads
    all_gather  keys and values of all heads are gathered before, their gradients summed and scattered after
    a2a         each rank attends over the whole sequence for 1/cp of the heads: a multiple of cp, and of 2

A token sends n*(Dq+Dv) channels (a2a: also its query and output, each once), where gathered latents are Rkv+Dr; in turn
no rank holds keys and values of all tokens and heads for longer than the exchange.

One combination is refused: thd with a head dim above 192 on cuDNN below 9.19. On an H200 with Transformer Engine
2.20.2, cuDNN 9.14 gave a right output and gradients wrong by 7e-2 for 256/256, without a word.

Source: `AttnFuncWithCPAndKVP2P`, `...KVAllGather` and `...QKVOA2A` of Transformer Engine 2.20.2, and its
`set_context_parallel_group`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mla_attention.core_attention.interface import CoreAttention, describe, no_attention, rows_outside
from mla_attention.layers.te_import import import_te, te_obstacle, te_version
from mla_attention.packed import PackedSeqParams
from mla_attention.token_layout import TokenLayout

if TYPE_CHECKING:
    from mla_attention.parallel.rank_group import RankGroup

_LARGEST_PACKED_DIM = 192  # of thd on cuDNN older than:
_CUDNN_FOR_WIDE_PACKED = (9, 19)
_NO_BACKEND = "No dot product attention backend"  # how Transformer Engine's own error starts


class TEAttention(CoreAttention):
    """`te.pytorch.DotProductAttention` on `[S, B, n, D]` and `[T, n, D]`; its module is built at the first forward.

    That module has no parameters and stays out of the module tree: nothing of it is in a state dict, a copy or a
    pickle.

    Args:
        qk_dim, v_dim, scale, dropout: as of every core attention.
        cp_comm_type: how context-parallel ranks exchange keys and values; None serves one rank only.
    """

    name = "te"

    def __init__(
        self, qk_dim: int, v_dim: int, scale: float, dropout: float = 0.0, *, cp_comm_type: str | None = None
    ) -> None:
        super().__init__(qk_dim, v_dim, scale, dropout)
        self.cp_comm_type = cp_comm_type
        self.ranks: RankGroup | None = None
        self._built: dict[tuple, nn.Module] = {}

    def exchange_over(self, ranks: RankGroup | None) -> None:
        """Exchange keys and values over these context-parallel ranks, where there is a `cp_comm_type`; None: there is
        one rank."""
        self.ranks = None if self.cp_comm_type is None else ranks
        self.context_parallel = self.ranks is not None
        self._built = {}

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
            return no_attention(query, key, value)
        packed = tokens.packed
        if packed is None:
            return self._attend(query, key, value, qkv_format="sbhd", attn_mask_type="causal")
        if tokens.cp_size > 1:
            return self._attend_share_of_pack(query, key, value, packed, tokens.cp_size)
        if packed.num_sequences == 0 or packed.longest_rows == 0:
            return no_attention(query, key, value)
        outside = rows_outside(tokens)
        if outside is not None:
            query, key, value = (t.masked_fill(outside, 0) for t in (query, key, value))
        output = self._attend(query, key, value, **_as_thd(packed, tokens.key_rows))
        return output if outside is None else output.masked_fill(outside, 0)

    def _attend_share_of_pack(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, cp_size: int
    ) -> Tensor:
        """A context-parallel rank's rows of a pack, those of its sequences first."""
        if packed.host_offsets is None:
            raise ValueError(
                f"packed_seq_params: built with validate=False, but cp_comm_type {self.cp_comm_type!r} needs the "
                "lengths on the host; allowed are validate=True, or cp_comm_type None"
            )
        inside = packed.host_offsets[-1] // cp_size
        outside = query.shape[0] - inside
        if inside == 0:
            return no_attention(query, key, value)
        how = _as_thd(packed, packed.host_offsets[-1])
        # The same object as the offsets: no padding that Transformer Engine would have to step over.
        padded = {"cu_seqlens_q_padded": how["cu_seqlens_q"], "cu_seqlens_kv_padded": how["cu_seqlens_kv"]}
        output = self._attend(query[:inside], key[:inside], value[:inside], **how, **padded)
        return F.pad(output, (0, 0, 0, 0, 0, outside)) if outside else output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        query, key, value = (t.contiguous() for t in (query, key, value))  # separate heads: its one layout for MLA
        try:
            output = self._module(query.shape[-2], query.device)(query, key, value, **how)
        except ValueError as error:
            if not str(error).startswith(_NO_BACKEND):
                raise
            others = "" if self.ranks is None else " with cp_comm_type None"
            raise ValueError(
                f"core_attention_backend: given 'te', but Transformer Engine {te_version()} with cuDNN "
                f"{_dotted(cudnn_version())} has no kernel for qk dim {self.qk_dim}, v dim {self.v_dim}, "
                f"{how['qkv_format']}, {query.dtype} on {describe(query.device)}{self._exchange()}; "
                f"allowed are 'auto', 'sdpa' and others{others}"
            ) from error
        except AssertionError as error:  # how Transformer Engine says what an exchange does not serve
            if self.ranks is None:
                raise
            said = " ".join(str(error).split())
            raise ValueError(
                f"cp_comm_type: given {self.cp_comm_type!r}, which Transformer Engine {te_version()} refuses for "
                f"{how['qkv_format']}, {query.shape[-2]} heads on {self.ranks.size} ranks ({said}); "
                "allowed are the other types, or None with core_attention_backend 'auto'"
            ) from error
        return output.view(*query.shape[:-1], self.v_dim)

    def _module(self, heads: int, device: torch.device) -> nn.Module:
        """The module for this many heads, and for the dropout and the determinism that hold now."""
        key = (heads, device, self.dropout_now, torch.are_deterministic_algorithms_enabled())
        if key not in self._built:
            module = import_te().DotProductAttention(
                heads, (self.qk_dim, self.v_dim), attention_dropout=self.dropout_now, softmax_scale=self.scale
            )
            if self.ranks is not None:
                module.set_context_parallel_group(
                    self.ranks.group, list(self.ranks.ranks), _second_stream(device), self.cp_comm_type
                )
            self._built[key] = module
        return self._built[key]

    def _exchange(self) -> str:
        """How keys are exchanged, for messages; nothing on one rank."""
        return "" if self.ranks is None else f" with cp_comm_type {self.cp_comm_type!r} over {self.ranks.size} ranks"

    def extra_repr(self) -> str:
        exchange = "" if self.cp_comm_type is None else f", cp_comm_type={self.cp_comm_type}"
        return f"{super().extra_repr()}{exchange}"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_built": {}}


def _as_thd(packed: PackedSeqParams, rows: int) -> dict[str, Any]:
    offsets, longest = packed.row_offsets.to(torch.int32), packed.longest_within(rows)
    return {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which Transformer Engine runs every other step of an exchange beside the current one. One for all
    layers: what the allocator keeps for a stream serves no other."""
    return torch.cuda.Stream(device)


def cudnn_version() -> tuple[int, ...]:
    """Version of the cuDNN that Transformer Engine has loaded, which need not be torch's."""
    return tuple(import_te().get_cudnn_version())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
