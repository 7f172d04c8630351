"""The rotation in plain torch: the specification of the kernels beside it.

With half = emb_dim/2, table row p, cL = cos[p, :half], cR = cos[p, half:] and sL, sR likewise:

    a, b = x[0::2], x[1::2]                      (input_halves: a, b = x[:half], x[half:])
    L = a*cL - b*sL        R = b*cR + a*sR
    y = [L | R]                                  (remove_interleaving: y[0::2], y[1::2] = L, R)

`inverse` flips the sign of sin only. The transpose, which is the backward, reads gL, gR where y was written and puts
da = gL*cL + gR*sR and db = gR*cR - gL*sL where a and b were read. All of it is computed in fp32 (fp64 for fp64 input)
and rounded to the tensor's dtype once.
"""

import torch
from torch import Tensor

from ..host_checks import (
    check_floating,
    check_layout,
    check_out,
    check_pairing,
    check_rotation,
    check_same_rows,
    check_widths,
    megatron_widths,
)
from .positions_reference import table_rows


def compute_dtype(t: Tensor) -> torch.dtype:
    """fp64 for fp64 tensors, fp32 for all others."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _read(x: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    if halves:
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    return x[..., 0::2], x[..., 1::2]


def _write(first: Tensor, second: Tensor, halves: bool) -> Tensor:
    return torch.cat((first, second), -1) if halves else torch.stack((first, second), -1).flatten(-2)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, remove_interleaving: bool = False, halves: bool = False
) -> Tensor:
    """Rotate `[..., emb_dim]` in the compute dtype, without rounding: tables broadcast against `x`."""
    dtype = compute_dtype(x)
    a, b = _read(x.to(dtype), halves)
    cos_l, cos_r = _read(cos.to(dtype), halves=True)
    sin_l, sin_r = _read(-sin.to(dtype) if inverse else sin.to(dtype), halves=True)
    return _write(a * cos_l - b * sin_l, b * cos_r + a * sin_r, halves=not remove_interleaving)


def rotate_transposed(
    g: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, remove_interleaving: bool = False, halves: bool = False
) -> Tensor:
    """The transpose of `rotate` applied to `[..., emb_dim]` in the compute dtype, without rounding."""
    dtype = compute_dtype(g)
    left, right = _read(g.to(dtype), halves=not remove_interleaving)
    cos_l, cos_r = _read(cos.to(dtype), halves=True)
    sin_l, sin_r = _read(-sin.to(dtype) if inverse else sin.to(dtype), halves=True)
    return _write(left * cos_l + right * sin_r, right * cos_r - left * sin_l, halves)


def _rows(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_name: str,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
    position_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a query-like call and return its table rows."""
    check_floating(False, t=t)
    check_layout(
        "t", t, nope_dim + emb_dim, f"nope_dim {nope_dim} + emb_dim {emb_dim}", cu_name, cu_seqlens, position_ids
    )
    return checked_table_rows(t, cos, sin, emb_dim, cu_name, cu_seqlens, cp_rank, cp_size, position_ids)


def checked_table_rows(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    cu_name: str,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
    position_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Check tables and positions against `t` `[*tokens, n, d]` and return each token's cos and sin row."""
    check_rotation(False, t, cos, sin, emb_dim, cu_name, cu_seqlens, cp_rank, cp_size, position_ids)
    return table_rows((cos, sin), t.shape[:-2], cu_seqlens, cp_rank, cp_size, position_ids)


def split_channels(t: Tensor, nope_dim: int, emb_dim: int, rope_first: bool) -> tuple[Tensor, Tensor]:
    """The nope and the rotary channels of `t`, as views."""
    if rope_first:
        return t[..., emb_dim:], t[..., :emb_dim]
    return t[..., :nope_dim], t[..., nope_dim:]


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
    """Return a new tensor with the rotary channels of `t` rotated; see the module's formula.

    Args:
        t: `[S, B, n, nope_dim + emb_dim]`, or packed `[T, n, nope_dim + emb_dim]` with `cu_seqlens_q`.
        cos: cosines, `[positions, 1, 1, emb_dim]`, any floating dtype.
        sin: sines, likewise.
        nope_dim: channels that are copied.
        emb_dim: channels that are rotated, even: the last ones of a head.
        cu_seqlens_q: global offsets int32/int64 `[sequences + 1]` of a packed batch.
        cp_rank: context-parallel rank; for packed batches only, sbhd callers cut the table themselves.
        cp_size: context-parallel size, likewise.
        rotary_interleaved: must be False.
        inverse: flip the sign of sin.
        remove_interleaving: write pairs back interleaved instead of in halves.
        position_ids: `[T]`, `[S]` or `[S*B]`: table rows that override all other rules.
        rope_first: rotate the first `emb_dim` channels instead of the last.
        input_halves: read pairs half-split; excludes `remove_interleaving`.

    Returns:
        Tensor of the shape and dtype of `t`.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Megatron-LM's fused_mla_yarn_rope_apply; half-split pairing as in DeepSeek-V3.2's indexer.
    """
    check_widths(emb_dim, nope_dim=nope_dim)
    check_pairing(rotary_interleaved, remove_interleaving, input_halves)
    rows = _rows(t, cos, sin, nope_dim, emb_dim, "cu_seqlens_q", cu_seqlens_q, cp_rank, cp_size, position_ids)
    nope, rope = split_channels(t, nope_dim, emb_dim, rope_first)
    rotated = rotate(rope, *rows, inverse, remove_interleaving, input_halves).to(t.dtype)
    return torch.cat((rotated, nope) if rope_first else (nope, rotated), -1)


def _written_in_place(t: Tensor, nope_dim: int, emb_dim: int, rope_first: bool, rotated: Tensor) -> Tensor:
    """Store the rotated channels into `t` under autograd's own rules for in-place operations."""
    if t.requires_grad and torch.is_grad_enabled() and _is_output_view_of_custom_function(t):
        # Autograd forbids rewriting the history of such a view (layers in custom Functions return them). Its data is
        # updated all the same, which makes later uses of `t` raise, and the result carries the right history.
        nope, _ = split_channels(t, nope_dim, emb_dim, rope_first)
        result = torch.cat((rotated, nope) if rope_first else (nope, rotated), -1)
        with torch.no_grad():
            split_channels(t.detach(), nope_dim, emb_dim, rope_first)[1].copy_(rotated)
        return result
    split_channels(t, nope_dim, emb_dim, rope_first)[1].copy_(rotated)
    return t


def _is_output_view_of_custom_function(t: Tensor) -> bool:
    """Whether `t` is a view that a custom autograd Function made of a tensor which nobody differentiates."""
    if torch.compiler.is_compiling() or not t._is_view():
        return False
    made = torch._C._autograd._get_creation_meta(t)
    base = t._base
    return made == torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION and base is not None and not base.requires_grad


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
    """Rotate the rotary channels of `t` in place and return `t`.

    Formula, Args: as `fused_mla_rope_out_of_place`.

    Returns:
        `t`, under autograd with the history of the rotation.

    Raises:
        ValueError: naming the argument that does not fit.
        RuntimeError: from torch, when `t` is a leaf that requires grad, or a view whose history cannot be rewritten.

    Source: Megatron-LM's fused_mla_yarn_rope_apply.
    """
    check_widths(emb_dim, nope_dim=nope_dim)
    check_pairing(rotary_interleaved, remove_interleaving, input_halves)
    rows = _rows(t, cos, sin, nope_dim, emb_dim, "cu_seqlens_q", cu_seqlens_q, cp_rank, cp_size, position_ids)
    rope = split_channels(t, nope_dim, emb_dim, rope_first)[1]
    rotated = rotate(rope, *rows, inverse, remove_interleaving, input_halves).to(t.dtype)
    return _written_in_place(t, nope_dim, emb_dim, rope_first, rotated)


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
    """Rotate `t` in place outside autograd and return it.

    Formula, Args, Raises: as `fused_mla_rope_out_of_place`.

    Returns:
        `t`.

    Source: the autograd-free pair of Megatron-LM's dsv4_fused_rope_output_alias branch.
    """
    return fused_mla_rope_inplace(
        t,
        cos,
        sin,
        nope_dim,
        emb_dim,
        cu_seqlens_q,
        cp_rank,
        cp_size,
        False,
        inverse,
        remove_interleaving,
        position_ids,
        rope_first,
        input_halves,
    )


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

    For unit-magnitude tables it is also the inverse of it; for tables scaled by m it returns m^2 times the input.

    Args:
        out: where the result goes, of the shape, dtype and device of `t`; it may be `t` itself. None: a new tensor.
        Others: as `fused_mla_rope_out_of_place`.

    Returns:
        `out`, or a new tensor: `t` is left alone unless it is `out`.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: the autograd-free pair of Megatron-LM's dsv4_fused_rope_output_alias branch.
    """
    check_widths(emb_dim, nope_dim=nope_dim)
    check_pairing(False, remove_interleaving, input_halves)
    rows = _rows(t, cos, sin, nope_dim, emb_dim, "cu_seqlens_q", cu_seqlens_q, cp_rank, cp_size, position_ids)
    check_out(t, out)
    nope, rope = split_channels(t, nope_dim, emb_dim, rope_first)
    rotated = rotate_transposed(rope, *rows, inverse, remove_interleaving, input_halves).to(t.dtype)
    result = torch.cat((rotated, nope) if rope_first else (nope, rotated), -1)
    return result if out is None else out.copy_(result)


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
    """Concatenate `nope` and the rotated `rope` (pairs in, halves out) into one new tensor.

    Args:
        nope: `[S, B, n, d]`, or packed `[T, n, d]` with `cu_seqlens`; any strides.
        rope: the same leading dimensions, `emb_dim` wide, same dtype.
        cos: cosines, `[positions, 1, 1, emb_dim]`, any floating dtype.
        sin: sines, likewise.
        cu_seqlens: global offsets int32/int64 `[sequences + 1]` of a packed batch.
        cp_rank: context-parallel rank (packed only).
        cp_size: context-parallel size (packed only).
        position_ids: `[T]`, `[S]` or `[S*B]`: table rows that override all other rules.

    Returns:
        `[..., n, d + emb_dim]`.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Megatron-LM's pull request 6343, for absorbed queries (d = Rkv) and the latent key (n = 1).
    """
    check_floating(False, rope=rope)
    emb_dim = rope.shape[-1] if rope.ndim else 0
    check_widths(emb_dim)
    check_floating(False, nope=nope, rope=rope)
    check_layout("rope", rope, emb_dim, "emb_dim", "cu_seqlens", cu_seqlens, position_ids)
    check_same_rows("nope", nope, "rope", rope)
    rows = checked_table_rows(rope, cos, sin, emb_dim, "cu_seqlens", cu_seqlens, cp_rank, cp_size, position_ids)
    return torch.cat((nope, rotate(rope, *rows).to(rope.dtype)), -1)


def fused_apply_mla_rope_for_q(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_head_dim: int | None = None,
    emb_dim: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    rope_first: bool = False,
    input_halves: bool = False,
    *,
    nope_dim: int | None = None,
) -> Tensor:
    """Megatron-LM's name for `fused_mla_rope_inplace`; the fourth argument is `qk_head_dim` or `nope_dim`.

    Formula, Args, Returns: as `fused_mla_rope_inplace`.

    Raises:
        ValueError: unless exactly one of the two names, and `emb_dim`, is given; and as `fused_mla_rope_inplace`.

    Source: megatron-core 0.19.2 (`qk_head_dim`) and Megatron-LM's dev branch (`nope_dim`).
    """
    return fused_mla_rope_inplace(
        t,
        cos,
        sin,
        *megatron_widths(qk_head_dim, nope_dim, emb_dim),
        cu_seqlens_q,
        cp_rank,
        cp_size,
        rotary_interleaved,
        inverse,
        remove_interleaving,
        position_ids,
        rope_first,
        input_halves,
    )
