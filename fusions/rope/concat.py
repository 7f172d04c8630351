"""Concatenation of unrotated and rotated channels in one pass, with autograd: absorbed queries and latent keys.

    out[.., n, :d] = nope        out[.., n, d:] = rotate(rope), pairs in, halves out

The kernel is that of `rows.py`; backward splits the gradient and rotates its tail back, again in one pass.
Bytes: d + emb_dim read and written a row, in each direction.
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
from ..once_differentiable import once_differentiable
from .registry import is_interpreted, register, unit_stride
from .rows import launch_rope_rows, rope_rows_kernel

_ARGUMENTS = "Tensor cos, Tensor sin, Tensor? cu_seqlens, Tensor? position_ids, int cp_rank, int cp_size"

_INTERPRETED = is_interpreted(rope_rows_kernel)  # here, because dynamo cannot ask what a kernel is


def launch_concat(
    nope: Tensor,
    rope: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    cp_rank: int = 0,
    cp_size: int = 1,
    *,
    backward: bool = False,
    block_rows: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Concatenate into `out`, or with `backward` split `out` into `nope` and `rope`.

    Args:
        backward: the transposed pass.
        block_rows: rows a program, to force one; a power of two.
        num_warps: warps a program, to force them.
        Others: checked arguments of `fused_mla_rope_concat`.
    """
    nope_dim, emb_dim = nope.shape[-1], rope.shape[-1]
    apart, together = ((rope, 0), (nope, 0)), ((out, nope_dim), (out, 0))
    (rope_in, nope_in), (rope_out, nope_out) = (together, apart) if backward else (apart, together)
    launch_rope_rows(
        rope_in,
        rope_out,
        nope_in,
        nope_out,
        cos,
        sin,
        nope_dim,
        emb_dim,
        cu_seqlens,
        cp_rank,
        cp_size,
        position_ids,
        read_halves=backward,
        write_halves=not backward,
        transposed=backward,
        block_rows=block_rows,
        num_warps=num_warps,
    )


def _empty_output(nope: Tensor, rope: Tensor, *_: Any) -> Tensor:
    shape = (*nope.shape[:-1], nope.shape[-1] + rope.shape[-1])
    return torch.empty(shape, dtype=nope.dtype, device=nope.device)


def _empty_gradients(grad: Tensor, cos: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, emb_dim = grad.shape[:-1], cos.shape[-1]
    dnope = torch.empty((*rows, grad.shape[-1] - emb_dim), dtype=grad.dtype, device=grad.device)
    return dnope, torch.empty((*rows, emb_dim), dtype=grad.dtype, device=grad.device)


def _launch_forward(nope: Tensor, rope: Tensor, *arguments: Any) -> Tensor:
    out = _empty_output(nope, rope)
    launch_concat(unit_stride(nope), unit_stride(rope), out, *arguments)
    return out


def _launch_backward(grad: Tensor, cos: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    dnope, drope = _empty_gradients(grad, cos)
    launch_concat(dnope, drope, unit_stride(grad), cos, *arguments, backward=True)
    return dnope, drope


concat = register(f"mla_rope_concat(Tensor nope, Tensor rope, {_ARGUMENTS}) -> Tensor", _launch_forward, _empty_output)
concat_backward = register(
    f"mla_rope_concat_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor)", _launch_backward, _empty_gradients
)


class _RopeConcat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        nope: Tensor,
        rope: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, cu_seqlens, position_ids)
        ctx.numbers = numbers
        return concat(nope, rope, cos, sin, cu_seqlens, position_ids, *numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dnope, drope = concat_backward(grad, *ctx.saved_tensors, *ctx.numbers)
        return dnope, drope, *(None,) * (4 + len(ctx.numbers))


def fused_mla_rope_concat(
    nope: Tensor,
    rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Concatenate `nope` and the rotated `rope` into one new tensor, in one pass.

    Formula: out = nope | [L | R] with L = a*cL - b*sL, R = b*cR + a*sR over the interleaved pairs (a, b) of `rope`, in
    fp32 and rounded once.

    Args:
        nope: `[S, B, n, d]`, or packed `[T, n, d]` with `cu_seqlens`; float16, bfloat16 or float32; any strides but a
            last one of 1. Absorbed queries have d = Rkv, the latent key one head.
        rope: the same leading dimensions, `emb_dim` wide (even), same dtype.
        cos: cosines, `[positions, 1, 1, emb_dim]`, any floating dtype.
        sin: sines, likewise.
        cu_seqlens: global offsets int32/int64 `[sequences + 1]` on the device; rows past the last use position 0.
        cp_rank: context-parallel rank (packed only).
        cp_size: context-parallel size (packed only).
        position_ids: int32/int64 `[T]`, `[S]` or `[S*B]`: table rows that override all other rules.

    Returns:
        Contiguous `[..., n, d + emb_dim]` in the dtype of `nope`.

    Raises:
        ValueError: naming the argument that does not fit.
        RuntimeError: for a CPU tensor, unless Triton interprets; on double backward.

    Source: Megatron-LM's pull request 6343.
    """
    check_floating(False, rope=rope)
    emb_dim = rope.shape[-1] if rope.ndim else 0
    check_widths(emb_dim)
    check_floating(True, nope=nope, rope=rope)
    check_layout("rope", rope, emb_dim, "emb_dim", "cu_seqlens", cu_seqlens, position_ids)
    check_same_rows("nope", nope, "rope", rope)
    check_rotation(True, rope, cos, sin, emb_dim, "cu_seqlens", cu_seqlens, cp_rank, cp_size, position_ids)
    check_kernel_device("fused_mla_rope_concat", rope, _INTERPRETED)
    if not (torch.is_grad_enabled() and (nope.requires_grad or rope.requires_grad)):
        return concat(nope, rope, cos, sin, cu_seqlens, position_ids, cp_rank, cp_size)
    return _RopeConcat.apply(nope, rope, cos, sin, cu_seqlens, position_ids, cp_rank, cp_size)
