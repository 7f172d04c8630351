"""Query RoPE with autograd: in place, and out of place in one pass.

Forward and backward of both are one launch of the kernel in `rows.py`. The backward of the in-place rotation moves only
the rotary slice too when the gradient is provably nobody else's (`gradient_privacy.py`), and otherwise writes a new
gradient in one pass: a gradient that anyone else can see is never modified.

How the rewritten tensor enters autograd depends on what `t` is:
  not a view          t itself, marked dirty.
  a view of all of a  The base is marked dirty and a new view of it is returned, because autograd would otherwise clone
  tensor              the whole gradient twice in backward. `t` and the base have the right history too.
  a view of a part    t itself, marked dirty; autograd's own copies of the gradient in backward are unavoidable.
  the output of a     Where such a view's base is differentiated by nobody (layers that reshape their result inside a
  custom Function     Function): a tensor on the same memory with the right history. Autograd forbids to rewrite that of
                      `t` itself, and makes later uses of `t` raise.
A leaf that requires grad, a view of one, and views that autograd cannot update are refused before the launch.
"""

from typing import Any

import torch
from torch import Tensor

from ..once_differentiable import once_differentiable
from .gradient_privacy import gradient_is_private
from .raw import check_query, rope_inplace, rope_new


def _write_gradient(ctx: Any, grad: Tensor) -> Tensor:
    """A new gradient, in one pass."""
    cos, sin, cu_seqlens, position_ids = ctx.saved_tensors
    return rope_new(grad, cos, sin, cu_seqlens, position_ids, *ctx.numbers, True)


class _RopeInPlace(torch.autograd.Function):
    """In place on `t`, which is `shape` large when it is the base of a view."""

    @staticmethod
    def forward(
        ctx: Any,
        t: Tensor,
        shape: torch.Size | None,
        alias: bool,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        heads = t if shape is None else t.view(shape)
        rope_inplace(heads, cos, sin, cu_seqlens, position_ids, *numbers, False)
        ctx.save_for_backward(cos, sin, cu_seqlens, position_ids)
        ctx.shape = shape
        ctx.numbers = numbers
        if alias:
            memory = torch.empty(0, dtype=t.dtype, device=t.device)
            return memory.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
        ctx.mark_dirty(t)
        return t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (6 + len(ctx.numbers))
        if not torch.compiler.is_compiling() and gradient_is_private(grad):
            cos, sin, cu_seqlens, position_ids = ctx.saved_tensors
            heads = grad if ctx.shape is None else grad.view(ctx.shape)
            rope_inplace(heads, cos, sin, cu_seqlens, position_ids, *ctx.numbers, True)
            return grad, *nothing
        if ctx.shape is None:
            return _write_gradient(ctx, grad), *nothing
        return _write_gradient(ctx, grad.reshape(ctx.shape)).view(grad.shape), *nothing


class _RopeOutOfPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        t: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, cu_seqlens, position_ids)
        ctx.numbers = numbers
        return rope_new(t, cos, sin, cu_seqlens, position_ids, *numbers, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _write_gradient(ctx, grad), *(None,) * (4 + len(ctx.numbers))


def _base_to_rewrite(t: Tensor) -> tuple[Tensor | None, bool]:
    """Decide how autograd learns of the rewritten `t`: (base to mark dirty or None, whether to return an alias).

    Raises:
        RuntimeError: when autograd could not give `t` a right history, as torch's own in-place operations do.
    """
    if t.is_leaf:
        raise RuntimeError("t is a leaf that requires grad, to be changed in place: pass t.clone()")
    base = t._base
    if base is None:
        return None, False
    meta = torch._C._autograd.CreationMeta
    made = torch._C._autograd._get_creation_meta(t)
    if made == meta.DEFAULT:
        if base.is_leaf:
            raise RuntimeError("t is a view of a leaf that requires grad, to be changed in place: pass t.clone()")
        same_elements = base.numel() == t.numel() and base.storage_offset() == t.storage_offset()
        whole = same_elements and base.dtype == t.dtype and base.is_contiguous() and t.is_contiguous()
        return (base if whole else None), False
    if made == meta.IN_CUSTOM_FUNCTION and not base.requires_grad:
        return None, True
    raise RuntimeError(
        f"t is a view whose history autograd cannot rewrite ({made.name}), to be changed in place: pass t.clone()"
    )


def fused_mla_rope_inplace(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    rope_first: bool = False,
    input_halves: bool = False,
) -> Tensor:
    """Rotate `emb_dim` channels of each head of `t` in place.

    Formula, over pairs (a, b) = (x[0::2], x[1::2]) and table row p with halves cL, cR, sL, sR:
    L = a*cL - b*sL, R = b*cR + a*sR, y = [L | R]; in fp32, rounded once to the dtype of `t`.

    Args:
        t: `[S, B, n, nope_dim + emb_dim]`, or packed `[T, n, nope_dim + emb_dim]` with `cu_seqlens_q`; float16,
            bfloat16 or float32; any strides but a last one of 1.
        cos: cosines, `[positions, 1, 1, emb_dim]`, any floating dtype.
        sin: sines, likewise.
        nope_dim: channels that are left alone.
        emb_dim: channels that are rotated, even: the last ones of a head.
        cu_seqlens_q: global offsets int32/int64 `[sequences + 1]` on the device; rows past the last use position 0.
        cp_rank: context-parallel rank; for packed batches only, sbhd callers cut the table themselves.
        cp_size: context-parallel size, likewise.
        rotary_interleaved: must be False.
        inverse: flip the sign of sin (the permutation of pairs into halves is not undone).
        remove_interleaving: write pairs back interleaved, y[0::2], y[1::2] = L, R, instead of in halves.
        position_ids: int32/int64 `[T]`, `[S]` or `[S*B]`: table rows that override all other rules; a row outside the
            table gives NaN.
        rope_first: rotate the first `emb_dim` channels instead of the last.
        input_halves: read pairs half-split, a, b = x[:half], x[half:]; excludes `remove_interleaving`.

    Returns:
        `t`, or where `t` is a view that autograd could only update at the price of whole copies, another tensor on the
        same memory (same `data_ptr`, shape and strides).

    Raises:
        ValueError: naming the argument that does not fit.
        RuntimeError: for a CPU tensor, unless Triton interprets; for a leaf that requires grad or a view that autograd
            cannot update. In backward, when a tensor that autograd saved was overwritten, or on double backward.

    Source: Megatron-LM's fused_mla_yarn_rope_apply; half-split pairing as in DeepSeek-V3.2's indexer.
    """
    check_query(
        "fused_mla_rope_inplace",
        t,
        cos,
        sin,
        nope_dim,
        emb_dim,
        cu_seqlens_q,
        cp_rank,
        cp_size,
        rotary_interleaved,
        remove_interleaving,
        position_ids,
        input_halves,
    )
    numbers = (nope_dim, emb_dim, cp_rank, cp_size, inverse, remove_interleaving, rope_first, input_halves)
    if not (torch.is_grad_enabled() and t.requires_grad):
        rope_inplace(t, cos, sin, cu_seqlens_q, position_ids, *numbers, False)
        return t
    if torch.compiler.is_compiling():
        return _RopeInPlace.apply(t, None, False, cos, sin, cu_seqlens_q, position_ids, *numbers)
    base, alias = _base_to_rewrite(t)
    if base is None:
        return _RopeInPlace.apply(t, None, alias, cos, sin, cu_seqlens_q, position_ids, *numbers)
    whole = _RopeInPlace.apply(base, t.shape, False, cos, sin, cu_seqlens_q, position_ids, *numbers)
    return whole.view(t.shape)


def fused_mla_rope_out_of_place(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    rope_first: bool = False,
    input_halves: bool = False,
) -> Tensor:
    """Return a new tensor with `emb_dim` channels of each head of `t` rotated and the others copied, in one pass.

    Formula and Args: as `fused_mla_rope_inplace`; `t` is left alone.

    Returns:
        Contiguous tensor of the shape and dtype of `t`.

    Raises:
        ValueError: naming the argument that does not fit.
        RuntimeError: for a CPU tensor, unless Triton interprets; on double backward.

    Source: Megatron-LM's fused_mla_rope_out_of_place, which clones first.
    """
    check_query(
        "fused_mla_rope_out_of_place",
        t,
        cos,
        sin,
        nope_dim,
        emb_dim,
        cu_seqlens_q,
        cp_rank,
        cp_size,
        rotary_interleaved,
        remove_interleaving,
        position_ids,
        input_halves,
    )
    numbers = (nope_dim, emb_dim, cp_rank, cp_size, inverse, remove_interleaving, rope_first, input_halves)
    if not (torch.is_grad_enabled() and t.requires_grad):
        return rope_new(t, cos, sin, cu_seqlens_q, position_ids, *numbers, False)
    return _RopeOutOfPlace.apply(t, cos, sin, cu_seqlens_q, position_ids, *numbers)
