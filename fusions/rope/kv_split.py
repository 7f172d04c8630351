"""Key and value from the up-projection's output and the shared rotary key, with autograd.

Formula, layout and traffic: `key_value_kernels.py`; one launch forward, one backward.
"""

from typing import Any

import torch
from torch import Tensor

from ..host_checks import (
    check_floating,
    check_kernel_device,
    check_layout,
    check_pairing,
    check_rotation,
    check_same_rows,
    check_widths,
)
from ..once_differentiable import once_differentiable
from .key_value_kernels import key_value_kernel
from .key_value_launch import launch_key_value
from .registry import is_interpreted, register, unit_stride

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? cu_seqlens, Tensor? position_ids, int emb_dim, int k_dim, int v_dim, "
    "int cp_rank, int cp_size, bool remove_interleaving"
)

_INTERPRETED = is_interpreted(key_value_kernel)  # here, because dynamo cannot ask what a kernel is


def _empty_outputs(kv: Tensor, emb_dim: int, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor]:
    rows = kv.shape[:-1]
    key = torch.empty((*rows, k_dim + emb_dim), dtype=kv.dtype, device=kv.device)
    value = torch.empty((*rows, v_dim), dtype=kv.dtype, device=kv.device)
    return key, value


def _empty_gradients(dkey: Tensor, emb_dim: int, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor]:
    rows = dkey.shape[:-1]
    dkv = torch.empty((*rows, k_dim + v_dim), dtype=dkey.dtype, device=dkey.device)
    dpos = torch.empty((*rows[:-1], 1, emb_dim), dtype=dkey.dtype, device=dkey.device)
    return dkv, dpos


def _launch_forward(kv: Tensor, k_pos_emb: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    key, value = _empty_outputs(kv, *arguments[4:7])
    launch_key_value(unit_stride(kv), unit_stride(k_pos_emb), key, value, *arguments)
    return key, value


def _launch_backward(dkey: Tensor, dvalue: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    dkv, dpos = _empty_gradients(dkey, *arguments[4:7])
    launch_key_value(dkv, dpos, unit_stride(dkey), unit_stride(dvalue), *arguments, backward=True)
    return dkv, dpos


kv_split = register(
    f"mla_rope_kv_split(Tensor kv, Tensor k_pos_emb, {_ARGUMENTS}) -> (Tensor, Tensor)",
    _launch_forward,
    lambda kv, k_pos_emb, *arguments: _empty_outputs(kv, *arguments[4:7]),
)
kv_split_backward = register(
    f"mla_rope_kv_split_backward(Tensor dkey, Tensor dvalue, {_ARGUMENTS}) -> (Tensor, Tensor)",
    _launch_backward,
    lambda dkey, dvalue, *arguments: _empty_gradients(dkey, *arguments[4:7]),
)


class _RopeKvSplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kv: Tensor,
        k_pos_emb: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        *numbers: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, cu_seqlens, position_ids)
        ctx.numbers = numbers
        return kv_split(kv, k_pos_emb, cos, sin, cu_seqlens, position_ids, *numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkey: Tensor, dvalue: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, cu_seqlens, position_ids = ctx.saved_tensors
        dkv, dpos = kv_split_backward(dkey, dvalue, cos, sin, cu_seqlens, position_ids, *ctx.numbers)
        return dkv, dpos, *(None,) * (4 + len(ctx.numbers))


def fused_mla_rope_kv_split(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Split `kv` into key and value, and append the rotated shared rotary key to every head's key.

    Formula: key = k_nope | rotate(k_pos_emb), value = v, with the rotation of `fused_mla_rope_inplace` in fp32 and one
    rounding. Backward sums the heads' rotary gradients and rotates the sum back in fp32, and rounds once.

    Args:
        kv: `[S, B, n, k_dim + v_dim]`, or packed `[T, n, k_dim + v_dim]` with `cu_seqlens_kv`; float16, bfloat16 or
            float32; any strides but a last one of 1.
        k_pos_emb: `[S, B, 1, emb_dim]` or `[T, 1, emb_dim]`, same dtype.
        cos: cosines, `[positions, 1, 1, emb_dim]`, any floating dtype.
        sin: sines, likewise.
        emb_dim: rotary width, even.
        k_dim: width of a head's unrotated key.
        v_dim: width of a head's value.
        cu_seqlens_kv: global offsets int32/int64 `[sequences + 1]` on the device; rows past the last use position 0.
        cp_rank: context-parallel rank (packed only).
        cp_size: context-parallel size (packed only).
        rotary_interleaved: must be False.
        remove_interleaving: write pairs back interleaved instead of in halves.
        position_ids: int32/int64 `[T]`, `[S]` or `[S*B]`: table rows that override all other rules.

    Returns:
        key `[..., n, k_dim + emb_dim]` and value `[..., n, v_dim]`, new and contiguous, in the dtype of `kv`.

    Raises:
        ValueError: naming the argument that does not fit.
        RuntimeError: for a CPU tensor, unless Triton interprets; on double backward.

    Source: Megatron-LM's fused_mla_yarn_rope_apply.
    """
    check_widths(emb_dim, k_dim=k_dim, v_dim=v_dim)
    check_pairing(rotary_interleaved, remove_interleaving)
    check_floating(True, kv=kv, k_pos_emb=k_pos_emb)
    widths = f"k_dim {k_dim} + v_dim {v_dim}"
    check_layout("kv", kv, k_dim + v_dim, widths, "cu_seqlens_kv", cu_seqlens_kv, position_ids)
    check_same_rows("k_pos_emb", k_pos_emb, "one head of kv", kv[..., :1, :])
    check_layout("k_pos_emb", k_pos_emb, emb_dim, "emb_dim", "cu_seqlens_kv", cu_seqlens_kv, position_ids)
    check_rotation(True, kv, cos, sin, emb_dim, "cu_seqlens_kv", cu_seqlens_kv, cp_rank, cp_size, position_ids)
    check_kernel_device("fused_mla_rope_kv_split", kv, _INTERPRETED)
    numbers = (emb_dim, k_dim, v_dim, cp_rank, cp_size, remove_interleaving)
    if not (torch.is_grad_enabled() and (kv.requires_grad or k_pos_emb.requires_grad)):
        return kv_split(kv, k_pos_emb, cos, sin, cu_seqlens_kv, position_ids, *numbers)
    return _RopeKvSplit.apply(kv, k_pos_emb, cos, sin, cu_seqlens_kv, position_ids, *numbers)
