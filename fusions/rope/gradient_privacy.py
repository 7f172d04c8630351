"""Whether a backward may overwrite the gradient that it was handed."""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..once_differentiable import once_differentiable


def _holders(grad: Any) -> tuple[int, ...]:
    """Reference counts of everything that can reach the memory of the tensor `grad` (`_use_count` has no type yet)."""
    storage = grad.untyped_storage()
    counts = (
        sys.getrefcount(grad),
        grad._use_count(),
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
    )
    base = grad._base
    if base is None:
        return counts
    return (*counts, sys.getrefcount(base), base._use_count())


def _measure(grad: Tensor) -> tuple[int, ...]:
    """`_holders` from as deep in the call stack as `gradient_is_private` calls it."""
    return _holders(grad)


class _Probe(torch.autograd.Function):
    """Records the counts of a gradient that nobody but the engine and this backward holds."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, found: list[tuple[int, ...]]) -> Tensor:
        ctx.found = found
        return t.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.found.append(_measure(grad))
        return grad, None


@cache
def _private_counts() -> frozenset[tuple[int, ...]]:
    """The counts of a private gradient: of a plain tensor, and of a view of a tensor that is itself private."""
    found: list[tuple[int, ...]] = []
    with torch.enable_grad():
        leaf = torch.ones(2, 2, device="cpu", requires_grad=True)
        (_Probe.apply(leaf, found) * 2.0).sum().backward()
        (_Probe.apply(leaf, found).view(4) * 2.0).sum().backward()
    return frozenset(found)


def _fills_its_memory(t: Tensor) -> bool:
    """Whether distinct indices are distinct elements: dense in some order of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def gradient_is_private(grad: Tensor) -> bool:
    """Whether nothing but the running backward can see `grad`, so that it may be overwritten and returned.

    To be called from the `backward` of a `once_differentiable` Function with its own argument. A gradient may be
    visible elsewhere: kept by a hook or by the caller, shared with the other operand of a sum, expanded from one
    element, captured as the result of `torch.autograd.grad`, or part of a graph that is differentiated again. Every
    such holder is a reference to the tensor, to the tensor that it is a view of, or to its storage, from Python or from
    C++. So these counts are compared with those of a gradient that is known to be private, measured once in a backward
    of the same form: any holder more, and the answer is no. The autograd engine decides in the same way (one reference
    to the tensor, one to the storage) whether it may accumulate into a gradient buffer in place.

    The answer is also no for tensor subclasses, under dispatch modes, without a global interpreter lock, and on torch
    releases that do not tell a tensor's use count. No is always safe: the caller then writes a new gradient.
    """
    if type(grad) is not Tensor or grad.requires_grad or not hasattr(grad, "_use_count"):
        return False
    if torch._C._len_torch_dispatch_stack() or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    if not _fills_its_memory(grad) or (grad.shape[-1] > 1 and grad.stride(-1) != 1):  # the kernels want a unit stride
        return False
    return _holders(grad) in _private_counts()
