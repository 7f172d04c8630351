"""How the launches become torch operators of the namespace `mla_attention`, and what every launcher needs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

_LIBRARY = torch.library.Library("mla_attention", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def register(schema: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define operator `schema` with its launch and the shapes that it returns; returns the operator.

    The operator is defined through `torch.library.Library` rather than `custom_op`: the same registry, schema and fake,
    at a twentieth of the host time of a call. Mutated arguments have their version counter raised by the launch, which
    is what lets autograd notice that a tensor it saved has been overwritten.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mla_attention::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mla_attention, name).default


def mark_written(t: Tensor) -> None:
    """Raise the version counter of a tensor that a kernel has overwritten."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


def on_device_of(t: Tensor) -> AbstractContextManager[Any]:
    """Make the device of `t` current for a launch, where it is not already."""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        return torch.cuda.device(t.device)
    return nullcontext()


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton's interpreter runs this kernel (settled when triton was imported)."""
    return not isinstance(kernel, triton.JITFunction)


def padded(width: int) -> int:
    """The power of two that holds `width` columns; at least 1."""
    return 1 << max(width - 1, 0).bit_length()


def blocks(count: int, size: int) -> int:
    """Blocks of `size` that hold `count`."""
    return -(-count // size)


def unit_stride(t: Tensor) -> Tensor:
    """`t`, or a contiguous copy where its last dimension is not contiguous (an expanded gradient)."""
    if t.stride(-1) == 1 or t.shape[-1] <= 1:
        return t
    return t.contiguous() if t.numel() else t.new_empty(t.shape)  # contiguous() leaves an empty tensor as it is


def token_strides(t: Tensor) -> tuple[int, int, int]:
    """Strides over s, b and heads of `[S, B, n, d]`; b is 0 for `[T, n, d]`."""
    if t.ndim == 4:
        return t.stride(0), t.stride(1), t.stride(2)
    return t.stride(0), 0, t.stride(1)


def token_count(t: Tensor) -> int:
    """Tokens of `[S, B, n, d]` or `[T, n, d]`.

    Raises:
        ValueError: beyond 2^30 tokens, which kernels number in 32 bits (element offsets are 64-bit).
    """
    tokens = t.shape[:-2].numel()
    if tokens > 2**30:
        raise ValueError(f"a call must have at most 2^30 tokens, got {tokens}")
    return tokens
