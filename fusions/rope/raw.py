"""Query RoPE without autograd: the three operators (in place, into `out`, into a new tensor) and the raw pair.

Formula, layouts and traffic: `rows.py`. All three serve forward and, with `transposed`, backward.
"""

from typing import Any

import torch
from torch import Tensor

from ..host_checks import (
    check_floating,
    check_kernel_device,
    check_layout,
    check_out,
    check_pairing,
    check_rotation,
    check_widths,
)
from .registry import is_interpreted, mark_written, register, unit_stride
from .rows import launch_rope_rows, rope_rows_kernel

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? cu_seqlens, Tensor? position_ids, int nope_dim, int emb_dim, int cp_rank, "
    "int cp_size, bool inverse, bool remove_interleaving, bool rope_first, bool input_halves, bool transposed"
)


def launch_query_rope(
    t: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    nope_dim: int,
    emb_dim: int,
    cp_rank: int = 0,
    cp_size: int = 1,
    inverse: bool = False,
    remove_interleaving: bool = False,
    rope_first: bool = False,
    input_halves: bool = False,
    transposed: bool = False,
    block_rows: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Rotate `t` into `out`; when they are the same tensor only the rotary slice moves.

    Args:
        block_rows: rows a program, to force one; a power of two.
        num_warps: warps a program, to force them.
        Others: checked arguments of the public functions.
    """
    rope_at, nope_at = (0, emb_dim) if rope_first else (nope_dim, 0)
    pairs_in_halves = (input_halves, not remove_interleaving)
    read_halves, write_halves = pairs_in_halves[::-1] if transposed else pairs_in_halves
    launch_rope_rows(
        (t, rope_at),
        (out, rope_at),
        None if out is t else (t, nope_at),
        None if out is t else (out, nope_at),
        cos,
        sin,
        nope_dim,
        emb_dim,
        cu_seqlens,
        cp_rank,
        cp_size,
        position_ids,
        inverse=inverse,
        read_halves=read_halves,
        write_halves=write_halves,
        transposed=transposed,
        block_rows=block_rows,
        num_warps=num_warps,
    )


def _launch_inplace(t: Tensor, *arguments: Any) -> None:
    launch_query_rope(t, t, *arguments)
    mark_written(t)


def _launch_into(t: Tensor, out: Tensor, *arguments: Any) -> None:
    launch_query_rope(unit_stride(t), out, *arguments)
    mark_written(out)


def _launch_new(t: Tensor, *arguments: Any) -> Tensor:
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    launch_query_rope(unit_stride(t), out, *arguments)
    return out


rope_inplace = register(f"mla_rope_inplace_(Tensor(a!) t, {_ARGUMENTS}) -> ()", _launch_inplace, lambda t, *_: None)
rope_into = register(
    f"mla_rope_into(Tensor t, Tensor(a!) out, {_ARGUMENTS}) -> ()", _launch_into, lambda t, out, *_: None
)
rope_new = register(
    f"mla_rope_out_of_place(Tensor t, {_ARGUMENTS}) -> Tensor",
    _launch_new,
    lambda t, *_: t.new_empty(t.shape),
)


_INTERPRETED = is_interpreted(rope_rows_kernel)  # here, because dynamo cannot ask what a kernel is


def check_query(
    function: str,
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
    rotary_interleaved: bool,
    remove_interleaving: bool,
    position_ids: Tensor | None,
    input_halves: bool,
) -> None:
    """Every refusal of the query functions, before anything is launched."""
    check_widths(emb_dim, nope_dim=nope_dim)
    check_pairing(rotary_interleaved, remove_interleaving, input_halves)
    check_floating(True, t=t)
    widths = f"nope_dim {nope_dim} + emb_dim {emb_dim}"
    check_layout("t", t, nope_dim + emb_dim, widths, "cu_seqlens_q", cu_seqlens, position_ids)
    check_rotation(True, t, cos, sin, emb_dim, "cu_seqlens_q", cu_seqlens, cp_rank, cp_size, position_ids)
    check_kernel_device(function, t, _INTERPRETED)


@torch.no_grad()
def mla_rope_apply_raw_(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    rope_first: bool = False,
    input_halves: bool = False,
) -> Tensor:
    """Rotate `t` in place outside autograd and return it; for use inside a caller's own autograd Function.

    Formula: L = a*cL - b*sL, R = b*cR + a*sR over pairs (a, b).

    Args: as `fused_mla_rope_inplace`, without `rotary_interleaved`.

    Returns:
        `t`.

    Raises:
        ValueError: naming the argument that does not fit.
        RuntimeError: for a CPU tensor, unless Triton interprets.

    Source: the autograd-free pair of Megatron-LM's dsv4_fused_rope_output_alias branch.
    """
    check_query(
        "mla_rope_apply_raw_",
        t,
        cos,
        sin,
        nope_dim,
        emb_dim,
        cu_seqlens_q,
        cp_rank,
        cp_size,
        False,
        remove_interleaving,
        position_ids,
        input_halves,
    )
    flags = (inverse, remove_interleaving, rope_first, input_halves, False)
    rope_inplace(t, cos, sin, cu_seqlens_q, position_ids, nope_dim, emb_dim, cp_rank, cp_size, *flags)
    return t


@torch.no_grad()
def mla_rope_unapply_raw(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    rope_first: bool = False,
    input_halves: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Apply the transposed rotation outside autograd: the backward of `mla_rope_apply_raw_` with the same flags.

    Formula: a = L*cL + R*sR, b = R*cR - L*sL. For unit-magnitude tables it is also the inverse; for tables scaled by m
    it returns m^2 times the input.

    Args:
        out: where the result goes, of the shape, dtype and device of `t`. `out=t` moves only the rotary slice. None: a
            new tensor, with the other channels copied in the same pass.
        Others: as `fused_mla_rope_inplace`.

    Returns:
        `out`, or the new tensor: `t` is left alone unless it is `out`.

    Raises:
        ValueError: naming the argument that does not fit, also for an `out` that overlaps `t` in part.
        RuntimeError: for a CPU tensor, unless Triton interprets.

    Source: the autograd-free pair of Megatron-LM's dsv4_fused_rope_output_alias branch.
    """
    check_query(
        "mla_rope_unapply_raw",
        t,
        cos,
        sin,
        nope_dim,
        emb_dim,
        cu_seqlens_q,
        cp_rank,
        cp_size,
        False,
        remove_interleaving,
        position_ids,
        input_halves,
    )
    check_out(t, out)
    flags = (inverse, remove_interleaving, rope_first, input_halves, True)
    arguments = (cos, sin, cu_seqlens_q, position_ids, nope_dim, emb_dim, cp_rank, cp_size, *flags)
    if out is None:
        return rope_new(t, *arguments)
    check_floating(True, t=t, out=out)
    if is_same_view(t, out):
        rope_inplace(out, *arguments)
    else:
        rope_into(t, out, *arguments)
    return out


def is_same_view(t: Tensor, out: Tensor) -> bool:
    """Whether both name the same elements in the same order."""
    if out is t:
        return True
    if torch.compiler.is_compiling():
        return False
    return out.data_ptr() == t.data_ptr() and out.stride() == t.stride()
