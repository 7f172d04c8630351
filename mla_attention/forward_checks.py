"""What a forward refuses before it computes anything, each in one line."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_attention.argument_checks import is_autocast
from mla_attention.configs import MLAConfig
from mla_attention.latent_cache import LatentCache
from mla_attention.packed import PackedSeqParams


def check_hidden_states(hidden_states: Tensor, width: int, weight: Tensor) -> None:
    """Refuse hidden states of another rank, width, dtype or device than a layer with this weight takes.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    if hidden_states.dim() != 3 or hidden_states.shape[-1] != width:
        raise ValueError(
            f"hidden_states: given shape {list(hidden_states.shape)}, "
            f"allowed is [S, B, {width}] (packed [T, 1, {width}])"
        )
    if hidden_states.layout != torch.strided:
        raise ValueError(f"hidden_states: given layout {hidden_states.layout}, allowed is torch.strided")
    if hidden_states.device != weight.device:
        raise ValueError(f"hidden_states: given on {hidden_states.device}, allowed is the parameters' {weight.device}")
    autocast = is_autocast(hidden_states.device)
    if not hidden_states.is_floating_point() or (hidden_states.dtype != weight.dtype and not autocast):
        raise ValueError(f"hidden_states: given dtype {hidden_states.dtype}, allowed is the parameters' {weight.dtype}")


def check_same_device(name: str, tensor: Tensor | None, device: torch.device) -> None:
    """Refuse a tensor on another kind of device than the hidden states.

    Raises:
        ValueError: naming both.
    """
    if tensor is not None and tensor.device.type != device.type:
        raise ValueError(f"{name}: given on {tensor.device}, allowed is the device of hidden_states, {device}")


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
