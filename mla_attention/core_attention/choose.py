"""Which core attention back end serves a layer.

`"auto"` chooses by a written rule from the device and the layout, never by timing:

| device | `[S, B]` | packed |
|---|---|---|
| CUDA | sdpa (cuDNN first) | sdpa where the lengths are known and long, else varlen, else as below |
| CUDA, not half precision | sdpa | sdpa where the lengths are known, else flex (fp64, dropout: reference) |
| others | sdpa | sdpa where the lengths are known, else reference |

Packed sequences go through sdpa one by one, neighbours of one length together, so the host must know their lengths
(`PackedSeqParams(validate=True)`), and what counts as long is a call, not a sequence.
Under context parallelism sdpa serves both layouts, flex or reference a pack whose lengths the host does not know.

A layer with `backend="te"` runs the back end "te" first, wherever that refuses nothing: on CUDA, without an attention
mask, on one context-parallel rank, and not in the packed combination whose gradients older cuDNN gets wrong (`te.py`).
Everywhere else the table holds, on CUDA with a warning that says why. Layers with `backend="torch"` reach "te" only by
its name, and context-parallel ones only by its name and a `cp_comm_type`.
"""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor

from mla_attention.configs import ConfigError, MLAConfig
from mla_attention.core_attention.eager import EagerAttention
from mla_attention.core_attention.flex import FlexAttention
from mla_attention.core_attention.interface import CoreAttention
from mla_attention.core_attention.sdpa import SDPAttention
from mla_attention.core_attention.te import TEAttention
from mla_attention.core_attention.varlen import VARLEN_DTYPES, VarlenAttention
from mla_attention.token_layout import TokenLayout

_LONG_CALL = 1024  # mean rows of a cuDNN call from which one for each run of equal lengths beats one flash call for all
_TILE = 128  # query rows that cuDNN takes at a time: a batch of shorter sequences is mostly masked

# What torch alone serves.
_CLASSES: dict[str, type[CoreAttention]] = {
    "sdpa": SDPAttention,
    "varlen": VarlenAttention,
    "flex": FlexAttention,
    "reference": EagerAttention,
}
BACKENDS = ("auto", *_CLASSES, "te")


class AutoAttention(CoreAttention):
    """Serves each forward with the back end that the rule above names for its device and layout.

    Args:
        prefer_te: for a layer with `backend="te"`.
    """

    name = "auto"
    context_parallel = True

    def __init__(self, qk_dim: int, v_dim: int, scale: float, dropout: float = 0.0, *, prefer_te: bool = False) -> None:
        super().__init__(qk_dim, v_dim, scale, dropout)
        classes = {**_CLASSES, "te": TEAttention} if prefer_te else _CLASSES
        self.choices = torch.nn.ModuleDict({name: cls(qk_dim, v_dim, scale, dropout) for name, cls in classes.items()})

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        chosen = self.choices[self.choice(query.device, tokens, query.dtype)]
        return chosen(query, key, value, tokens)

    def choice(self, device: torch.device, tokens: TokenLayout, dtype: torch.dtype = torch.bfloat16) -> str:
        """Name of the back end for this device, layout and dtype."""
        packed = tokens.packed
        te_may = "te" in self.choices and tokens.cp_size == 1 and tokens.attention_mask is None
        if te_may:
            reason = self._refusal("te", device, packed=packed is not None)
            if reason is None:
                return "te"
            if device.type == "cuda":
                warnings.warn(f"core_attention_backend 'auto' goes without 'te': {reason}", stacklevel=2)
        if packed is None:
            return "sdpa"
        offsets = packed.host_offsets
        known = offsets is not None
        flex_may = (
            device.type == "cuda" and dtype != torch.float64 and self._refusal("flex", device, packed=True) is None
        )
        without_lengths = "flex" if flex_may else "reference"
        if tokens.cp_size > 1 or device.type != "cuda" or dtype not in VARLEN_DTYPES:
            return "sdpa" if known else without_lengths
        if offsets is not None and _calls_are_long(offsets[-1], packed.num_sequences, len(packed.equal_runs)):
            return "sdpa"
        if self._refusal("varlen", device, packed=True) is None:
            return "varlen"
        return "sdpa" if known else without_lengths

    def _refusal(self, name: str, device: torch.device, *, packed: bool) -> str | None:
        return cast(CoreAttention, self.choices[name]).refusal(device, packed=packed)

    def extra_repr(self) -> str:
        first = "te, else " if "te" in self.choices else ""
        return f"{super().extra_repr()}, [S, B]: {first}sdpa, packed: {first}sdpa or varlen"


def _calls_are_long(rows: int, sequences: int, calls: int) -> bool:
    """Of packed sequences; a pack without a token makes no call."""
    return calls == 0 or (rows >= _LONG_CALL * calls and rows >= _TILE * sequences)


def build_core_attention(config: MLAConfig, scale: float, backend: str = "torch") -> CoreAttention:
    """The core attention that a config asks for, for a layer of the back end "torch" or "te".

    Raises:
        ConfigError: if `core_attention_backend` names no back end.
    """
    dims = (config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim, scale, config.attention_dropout)
    name = config.core_attention_backend
    if name == "auto":
        return AutoAttention(*dims, prefer_te=backend == "te")
    if name == "te":
        return TEAttention(*dims, cp_comm_type=config.cp_comm_type)
    if name in _CLASSES:
        return _CLASSES[name](*dims)
    raise ConfigError(f"core_attention_backend: given {name!r}, allowed are {', '.join(BACKENDS)}")
