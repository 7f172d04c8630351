"""What is refused before any launch, from facts that the host knows: no check here waits for the device.

With `MLA_ATTENTION_VALIDATE=1` the values of offsets and positions are read too, which costs one synchronisation.
Every message is one line that names the argument, what was given and what is allowed.
"""

import os
from itertools import pairwise

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
VALIDATE_VARIABLE = "MLA_ATTENTION_VALIDATE"


def values_are_validated() -> bool:
    """Whether checks that read device values are switched on (never while torch.compile traces)."""
    return not torch.compiler.is_compiling() and os.environ.get(VALIDATE_VARIABLE) == "1"


def check_tensor(name: str, value: object) -> None:
    """Refuse anything but a dense tensor; torch.compile, which takes no others, cannot ask for a layout in backward."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {'None' if value is None else type(value).__name__}")
    if not torch.compiler.is_compiling() and value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor (torch.strided), got {value.layout}")


def check_integers(**values: int) -> None:
    """Refuse anything but integers; True and False are none."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise ValueError(f"{name} must be an integer, got {value!r}")


def check_widths(emb_dim: int, **others: int) -> None:
    """Refuse an odd or empty rotary width, then any negative other width."""
    check_integers(emb_dim=emb_dim, **others)
    if emb_dim < 2 or emb_dim % 2:
        raise ValueError(f"emb_dim must be an even number of at least 2 (rotary pairs), got {emb_dim}")
    for name, width in others.items():
        if width < 0:
            raise ValueError(f"{name} must not be negative, got {width}")


def check_pairing(rotary_interleaved: bool, remove_interleaving: bool, input_halves: bool = False) -> None:
    """Refuse pairings that the rotation does not have."""
    if rotary_interleaved:
        raise ValueError(
            "rotary_interleaved must be False, got True: MLA reads interleaved pairs and cos/sin tables in halves"
        )
    if remove_interleaving and input_halves:
        raise ValueError(
            "input_halves=True excludes remove_interleaving=True: half-split input is written back in halves"
        )


def check_floating(kernel: bool, **tensors: Tensor) -> None:
    """Refuse dtypes, mismatched dtypes and devices, and (for a kernel) a last dimension that is not contiguous."""
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        check_tensor(name, t)
        if kernel and t.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{name} must be float16, bfloat16 or float32 for the fused kernel, got {t.dtype}")
        if not t.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {t.dtype}")
        if t.dtype != first.dtype:
            raise ValueError(f"{name} must have the dtype of {first_name} ({first.dtype}), got {t.dtype}")
        if t.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name} ({first.device}), got {t.device}")
        if kernel and t.ndim > 0 and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension (stride 1), got stride {t.stride(-1)}")


def check_layout(
    name: str, t: Tensor, width: int, widths: str, cu_name: str, cu_seqlens: Tensor | None, position_ids: Tensor | None
) -> None:
    """Refuse a tensor that is neither `[S, B, n, width]` nor, when packed, `[T, n, width]`."""
    if cu_seqlens is not None:
        allowed: tuple[int, ...] = (3,)
    else:
        allowed = (4,) if position_ids is None else (3, 4)
    if t.ndim not in allowed:
        layout = "[T, n, d] with" if cu_seqlens is not None else "[S, B, n, d] without"
        raise ValueError(f"{name} must be {layout} {cu_name}, got shape {tuple(t.shape)}")
    if t.shape[-1] != width:
        raise ValueError(f"{name} must be {width} wide ({widths}), got {t.shape[-1]}")
    if t.shape[-2] < 1:
        raise ValueError(f"{name} must have at least one head, got shape {tuple(t.shape)}")


def check_tables(kernel: bool, cos: Tensor, sin: Tensor, emb_dim: int, device: torch.device, rows: int) -> None:
    """Refuse tables that are not `[at least rows, ..., emb_dim]` floating tensors on the right device.

    Args:
        kernel: whether a kernel reads them, which needs contiguous rows and gives them no gradient.
        cos: cosine table.
        sin: sine table of the same shape and dtype.
        emb_dim: rotary width, which is the width of a table row.
        device: device of the tensor to be rotated.
        rows: rows that the call is known to read.
    """
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table)
        if not table.is_floating_point():
            raise ValueError(f"{name} must be a floating-point table, got {table.dtype}")
        if table.device != device:
            raise ValueError(f"{name} must be on the device of the rotated tensor ({device}), got {table.device}")
        if table.ndim < 2 or table.shape[-1] != emb_dim:
            raise ValueError(f"{name} must be [positions, 1, 1, emb_dim={emb_dim}], got shape {tuple(table.shape)}")
        if table.shape[1:-1].numel() != 1:
            raise ValueError(f"{name} must be [positions, 1, 1, emb_dim={emb_dim}], got shape {tuple(table.shape)}")
        if table.shape[0] < rows:
            raise ValueError(f"{name} must hold at least {rows} positions, got {table.shape[0]}")
        if kernel and table.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got stride {table.stride(-1)}")
        if kernel and torch.is_grad_enabled() and table.requires_grad:
            raise ValueError(f"{name} must not require grad: the fused kernel gives tables no gradient")
    if cos.shape[0] != sin.shape[0]:
        raise ValueError(f"sin must have the shape of cos {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if cos.dtype != sin.dtype:
        raise ValueError(f"sin must have the dtype of cos ({cos.dtype}), got {sin.dtype}")


def check_index_vector(name: str, index: Tensor, device: torch.device) -> None:
    """Refuse anything but a 1-D int32/int64 tensor on `device`."""
    check_tensor(name, index)
    if index.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} must be int32 or int64, got {index.dtype}")
    if index.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {tuple(index.shape)}")
    if index.device != device:
        raise ValueError(f"{name} must be on the device of the rotated tensor ({device}), got {index.device}")


def check_positions(
    token_shape: torch.Size,
    device: torch.device,
    table_rows: int,
    cu_name: str,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
    position_ids: Tensor | None,
) -> None:
    """Refuse offsets, ranks and positions that do not fit the tokens `(S, B)` or `(T,)`."""
    check_integers(cp_rank=cp_rank, cp_size=cp_size)
    if cp_size < 1:
        raise ValueError(f"cp_size must be at least 1, got {cp_size}")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must lie in [0, cp_size={cp_size}), got {cp_rank}")
    if cu_seqlens is not None:
        check_index_vector(cu_name, cu_seqlens, device)
        if cu_seqlens.shape[0] < 1:
            raise ValueError(f"{cu_name} must hold at least the offset 0, got an empty tensor")
    if position_ids is not None:
        check_index_vector("position_ids", position_ids, device)
        tokens = token_shape.numel()
        if position_ids.shape[0] not in (tokens, token_shape[0]):
            allowed = f"[{tokens}]" if len(token_shape) == 1 else f"[{token_shape[0]}] or [{tokens}]"
            raise ValueError(f"position_ids must be {allowed}, got shape {tuple(position_ids.shape)}")
    if values_are_validated():
        _check_values(token_shape.numel(), table_rows, cu_name, cu_seqlens, cp_size, position_ids)


def _check_values(
    tokens: int, table_rows: int, cu_name: str, cu_seqlens: Tensor | None, cp_size: int, position_ids: Tensor | None
) -> None:
    """Read offsets and positions on the host and refuse what the kernels would index wrongly."""
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        lengths = [after - before for before, after in pairwise(offsets)]
        if offsets[0] != 0 or min(lengths, default=0) < 0:
            raise ValueError(f"{cu_name} must start at 0 and never fall, got {offsets}")
        if offsets[-1] // cp_size > tokens:
            raise ValueError(f"{cu_name} must end at most at cp_size * T = {cp_size * tokens}, got {offsets[-1]}")
        longest = max(lengths, default=0)
        if position_ids is None and longest > table_rows:
            raise ValueError(f"cos must hold a position for the longest sequence ({longest}), got {table_rows}")
    if position_ids is not None and position_ids.numel():
        low, high = position_ids.min().item(), position_ids.max().item()
        if low < 0 or high >= table_rows:
            raise ValueError(f"position_ids must lie in [0, {table_rows}), got values from {low} to {high}")


def check_rotation(
    kernel: bool,
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    cu_name: str,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
    position_ids: Tensor | None,
) -> None:
    """Refuse tables and positions that do not fit the tokens of `t` `[*tokens, n, d]`."""
    token_shape = t.shape[:-2]
    by_row = cu_seqlens is None and position_ids is None
    needed_rows = token_shape[0] if by_row else min(token_shape.numel(), 1)
    check_tables(kernel, cos, sin, emb_dim, t.device, needed_rows)
    check_positions(token_shape, t.device, cos.shape[0], cu_name, cu_seqlens, cp_rank, cp_size, position_ids)


def check_same_rows(name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    """Refuse leading dimensions other than those of `like`."""
    if t.ndim != like.ndim or t.shape[:-1] != like.shape[:-1]:
        expected = (*like.shape[:-1], "d")
        raise ValueError(f"{name} must have the leading dimensions of {like_name} {expected}, got {tuple(t.shape)}")


def check_out(t: Tensor, out: Tensor | None) -> None:
    """Refuse an `out` that cannot take the result, or that overlaps `t` without being the same view of it."""
    if out is None:
        return
    check_tensor("out", out)
    if out.shape != t.shape or out.dtype != t.dtype or out.device != t.device:
        given = f"{tuple(out.shape)} {out.dtype} on {out.device}"
        raise ValueError(f"out must be {tuple(t.shape)} {t.dtype} on {t.device} like t, got {given}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out must not be expanded (one element behind several indices), got strides {out.stride()}")
    if torch.compiler.is_compiling() or t.numel() == 0 or t.device.type == "meta":
        return
    same_view = out.data_ptr() == t.data_ptr() and out.stride() == t.stride()
    if same_view or out.untyped_storage().data_ptr() != t.untyped_storage().data_ptr():
        return
    apart = abs(out.data_ptr() - t.data_ptr()) // t.element_size()
    if out.stride() != t.stride() or apart < t.shape[-1]:
        raise ValueError("out must be t itself, or share no element with it; got a different view of the same storage")


def megatron_widths(qk_head_dim: int | None, nope_dim: int | None, emb_dim: int | None) -> tuple[int, int]:
    """Resolve Megatron's two spellings of the fourth argument of `fused_apply_mla_rope_for_q`."""
    if emb_dim is None:
        raise ValueError("emb_dim must be given, got None")
    if qk_head_dim is not None and nope_dim is None:
        return qk_head_dim, emb_dim
    if nope_dim is not None and qk_head_dim is None:
        return nope_dim, emb_dim
    raise ValueError(
        f"exactly one of qk_head_dim and nope_dim must be given, got qk_head_dim={qk_head_dim}, nope_dim={nope_dim}"
    )


def check_kernel_device(function: str, t: Tensor, interpreted: bool) -> None:
    """Refuse a CPU tensor unless the kernels run in Triton's interpreter.

    Raises:
        RuntimeError: naming the unfused twin, which runs anywhere.
    """
    if t.device.type == "cpu" and not interpreted:
        raise RuntimeError(
            f"{function} is a Triton kernel and needs a CUDA device, got a CPU tensor: "
            f"use mla_attention.fusions.reference.{function}"
        )
