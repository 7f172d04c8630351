"""Backwards that cannot be differentiated again, and say so wherever the second gradient goes.

torch.autograd.function.once_differentiable answers with a node that raises when it runs. But torch.autograd.grad runs
the nodes that lead to what was asked for; that one leads nowhere, and what should have come through it is missing from
the result without a word. The node here leads to everything that the gradient depends on.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of a `torch.autograd.Function`: it runs without grad mode and without autocast.

    The forward has rounded its operands already, so an autocast that surrounds `loss.backward()` would only make them
    differ from each other.

    Raises:
        RuntimeError: when the gradient that it returns is differentiated.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler refuses a second derivative by itself
            return backward(ctx, *gradients)
        with _without_autocast(gradients):
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            seen = _Seen(ctx)
            with torch.no_grad():
                found = backward(seen, *gradients)
        sources = [t for t in (*gradients, *seen.saved) if isinstance(t, Tensor) and t.requires_grad]
        if not sources:
            return found
        refuse = lambda g: _Refuse.apply(g, *sources) if isinstance(g, Tensor) else g  # noqa: E731
        return tuple(map(refuse, found)) if isinstance(found, tuple) else refuse(found)

    return run


def _without_autocast(gradients: tuple[Any, ...]) -> AbstractContextManager[Any]:
    device = next((g.device.type for g in gradients if isinstance(g, Tensor)), "meta")
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class _Seen:
    """A Function's context that keeps the saved tensors which were asked for: they may be unpacked once only."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "ctx", ctx)
        object.__setattr__(self, "saved", ())

    def __getattr__(self, name: str) -> Any:
        if name != "saved_tensors":
            return getattr(self.ctx, name)
        if not self.saved:
            object.__setattr__(self, "saved", self.ctx.saved_tensors)
        return self.saved

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "a gradient that is differentiated again came from a once_differentiable function of mla_attention: "
            "second derivatives need the unfused functions, kv_assembly='split' and a core attention that has them"
        )
