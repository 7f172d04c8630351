"""The shared rotary key alone, for callers that assemble key and value themselves.

`rotate_shared_key_into` writes the rotated key into the last channels of every head, `shared_key_gradient` is its
transpose; the other channels are neither read nor written. Formula: `key_value_kernels.py` with k_dim = the first
rotary channel. Bytes a token: emb_dim read and n * emb_dim written, backward the reverse. No autograd.
"""

from typing import Any

import torch
from torch import Tensor

from ..host_checks import (
    check_floating,
    check_kernel_device,
    check_layout,
    check_rotation,
    check_same_rows,
    check_widths,
)
from .key_value_kernels import key_value_kernel
from .key_value_launch import launch_key_value
from .registry import is_interpreted, mark_written, register, unit_stride

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? cu_seqlens, Tensor? position_ids, int cp_rank, int cp_size, "
    "bool remove_interleaving"
)

_INTERPRETED = is_interpreted(key_value_kernel)  # here, because dynamo cannot ask what a kernel is


def _launch_forward(
    key: Tensor, k_pos_emb: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Any, position_ids: Any, *numbers: Any
) -> None:
    emb_dim = cos.shape[-1]
    widths = (emb_dim, key.shape[-1] - emb_dim, 0)
    launch_key_value(None, unit_stride(k_pos_emb), key, None, cos, sin, cu_seqlens, position_ids, *widths, *numbers)
    mark_written(key)


def _empty_gradient(dkey: Tensor, cos: Tensor, *_: Any) -> Tensor:
    return torch.empty((*dkey.shape[:-2], 1, cos.shape[-1]), dtype=dkey.dtype, device=dkey.device)


def _launch_backward(
    dkey: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Any, position_ids: Any, *numbers: Any
) -> Tensor:
    dpos = _empty_gradient(dkey, cos)
    emb_dim = cos.shape[-1]
    widths = (emb_dim, dkey.shape[-1] - emb_dim, 0)
    launch_key_value(
        None, dpos, unit_stride(dkey), None, cos, sin, cu_seqlens, position_ids, *widths, *numbers, backward=True
    )
    return dpos


shared_key_into = register(
    f"mla_rope_shared_key_into(Tensor(a!) key, Tensor k_pos_emb, {_ARGUMENTS}) -> ()", _launch_forward, lambda *_: None
)
shared_key_backward = register(
    f"mla_rope_shared_key_gradient(Tensor dkey, {_ARGUMENTS}) -> Tensor", _launch_backward, _empty_gradient
)


@torch.no_grad()
def rotate_shared_key_into(
    key: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Write the rotated shared rotary key into the last channels of every head of `key`, outside autograd.

    Formula: key[..., h, d:] = rotate(k_pos_emb[..., 0, :]) for every head h, as in `fused_mla_rope_kv_split`.

    Args:
        key: `[S, B, n, d + emb_dim]` or packed `[T, n, d + emb_dim]`; any strides but a last one of 1.
        k_pos_emb: `[S, B, 1, emb_dim]` or `[T, 1, emb_dim]`, same dtype.
        cos: cosines, `[positions, 1, 1, emb_dim]`, any floating dtype.
        sin: sines, likewise.
        cu_seqlens: global offsets int32/int64 `[sequences + 1]` of a packed batch.
        cp_rank: context-parallel rank (packed only).
        cp_size: context-parallel size (packed only).
        remove_interleaving: write pairs back interleaved instead of in halves.
        position_ids: int32/int64 `[T]`, `[S]` or `[S*B]`: table rows that override all other rules.

    Returns:
        `key`.

    Raises:
        ValueError: naming the argument that does not fit.
        RuntimeError: for a CPU tensor, unless Triton interprets.

    Source: the key layout of DeepSeek-V2 (one rotary key shared by the heads).
    """
    emb_dim = k_pos_emb.shape[-1]
    check_widths(emb_dim, nope_dim=key.shape[-1] - emb_dim)
    check_floating(True, key=key, k_pos_emb=k_pos_emb)
    check_layout("key", key, key.shape[-1], "any width", "cu_seqlens", cu_seqlens, position_ids)
    check_same_rows("k_pos_emb", k_pos_emb, "one head of key", key[..., :1, :])
    check_rotation(True, key, cos, sin, emb_dim, "cu_seqlens", cu_seqlens, cp_rank, cp_size, position_ids)
    check_kernel_device("rotate_shared_key_into", key, _INTERPRETED)
    shared_key_into(key, k_pos_emb, cos, sin, cu_seqlens, position_ids, cp_rank, cp_size, remove_interleaving)
    return key


@torch.no_grad()
def shared_key_gradient(
    dkey: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> Tensor:
    """The gradient of the shared rotary key: the heads' sum, rotated back in fp32 and rounded once.

    Formula: rotate^T(sum over h of dkey[..., h, d:]).

    Args:
        dkey: gradient of the key, `[S, B, n, d + emb_dim]` or packed `[T, n, d + emb_dim]`; not modified.
        Others: as `rotate_shared_key_into`; emb_dim is the width of the tables.

    Returns:
        `[S, B, 1, emb_dim]` or `[T, 1, emb_dim]` in the dtype of `dkey`.

    Raises:
        ValueError: naming the argument that does not fit.
        RuntimeError: for a CPU tensor, unless Triton interprets.

    Source: the transpose of `rotate_shared_key_into`.
    """
    emb_dim = cos.shape[-1]
    check_widths(emb_dim, nope_dim=dkey.shape[-1] - emb_dim)
    check_floating(True, dkey=unit_stride(dkey))
    check_layout("dkey", dkey, dkey.shape[-1], "any width", "cu_seqlens", cu_seqlens, position_ids)
    check_rotation(True, dkey, cos, sin, emb_dim, "cu_seqlens", cu_seqlens, cp_rank, cp_size, position_ids)
    check_kernel_device("shared_key_gradient", dkey, _INTERPRETED)
    return shared_key_backward(dkey, cos, sin, cu_seqlens, position_ids, cp_rank, cp_size, remove_interleaving)
