"""What a forward refuses before it computes anything, each in one line."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_attention.configs import MLAConfig
from mla_attention.latent_cache import LatentCache
from mla_attention.packed import PackedSeqParams


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse an argument that is neither None nor of its documented kind.

    Raises:
        ValueError: naming the argument, the kind given and the one allowed.
    """
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name}: given {type(value).__name__}, allowed is a {kind.__name__}")


def check_hidden_states(hidden_states: Tensor, width: int, dtype: torch.dtype) -> None:
    """Refuse hidden states of another rank, width or dtype than the layer's.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    if hidden_states.dim() != 3 or hidden_states.shape[-1] != width:
        raise ValueError(
            f"hidden_states: given shape {list(hidden_states.shape)}, "
            f"allowed is [S, B, {width}] (packed [T, 1, {width}])"
        )
    autocast = torch.is_autocast_enabled(hidden_states.device.type)
    if not hidden_states.is_floating_point() or (hidden_states.dtype != dtype and not autocast):
        raise ValueError(f"hidden_states: given dtype {hidden_states.dtype}, allowed is the parameters' {dtype}")


def refuse_topk_indices(topk_indices: Tensor | None) -> None:
    """A dense layer never ignores indices: it refuses them."""
    if topk_indices is not None:
        raise ValueError("topk_indices: given to a dense layer; allowed with experimental_attention_variant='dsa'")


def check_combination(
    attention_mask: Tensor | None,
    packed: PackedSeqParams | None,
    cache: LatentCache | None,
    config: MLAConfig,
    batch: int,
    rows: int,
    cp_size: int,
) -> None:
    """Refuse arguments that exclude each other, and masks that do not fit.

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    if packed is not None and batch != 1:
        raise ValueError(
            f"hidden_states: given batch size {batch} with packed_seq_params, allowed is [T, 1, {config.hidden_size}]"
        )
    if cache is not None and (packed is not None or cp_size > 1):
        raise ValueError(
            "cache: given with packed_seq_params or context parallelism; allowed is an [S, B] batch on one context rank"
        )
    if attention_mask is None:
        return
    others = {"packed_seq_params": packed is not None, "cache": cache is not None, "context parallelism": cp_size > 1}
    others["dsa"] = config.experimental_attention_variant == "dsa"
    for name, given in others.items():
        if given:
            raise ValueError(f"attention_mask: given together with {name}, allowed is None")
    if attention_mask.dtype != torch.bool:
        raise ValueError(f"attention_mask: given dtype {attention_mask.dtype}, allowed is torch.bool (True = masked)")
    target = (batch, 1, rows, rows)
    fits = attention_mask.dim() <= 4 and all(
        m in (1, t) for m, t in zip(attention_mask.shape[::-1], target[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attention_mask: given shape {list(attention_mask.shape)}, allowed is broadcastable to {list(target)}"
        )
