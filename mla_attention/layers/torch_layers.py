"""Linear and norm layers on plain torch, whose weights may be DTensor shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Share(NamedTuple):
    """Which part of a weight a layer holds: the `rank`-th of `size` equal parts along `dim`."""

    dim: int
    rank: int
    size: int


def identity(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's plain tensor of a parameter that may be a DTensor."""
    to_local = getattr(parameter, "to_local", None)  # a DTensor's: importing that class costs a second
    return parameter if to_local is None else to_local()


class LocalParameters(nn.Module):
    """A layer that computes with this rank's part of its parameters.

    `sum_gradient` is applied to every parameter on its way into the computation: the identity on one rank, and where
    each rank sees only some of the tokens a function whose backward sums the gradient over the ranks.
    """

    sum_gradient: Callable[[Tensor], Tensor] = staticmethod(identity)
    in_head_region = False  # whether a replicated layer is applied for each rank's own heads, inside their region

    def local(self, parameter: Tensor, part: Callable[[Tensor], Tensor] = identity) -> Tensor:
        """This rank's plain tensor of a parameter, or a part of it, differentiable."""
        return self.sum_gradient(part(local_tensor(parameter)))


class Linear(LocalParameters):
    """y = x @ weight.T, weight `[out, in]` initialised N(0, init_std), bias (where there is one) 0.

    The bias is not added: it is returned by the attention layer for the caller to fuse, as Megatron-LM does. Its
    gradient has then passed the caller's rows, not this layer's: `sum_bias_gradient` is its own `sum_gradient`.

    With a `share` the widths are those of the part, and its values are those that the part of the whole weight would
    have been drawn: ranks with the same seed hold different parts of one weight.
    """

    sum_bias_gradient: Callable[[Tensor], Tensor] = staticmethod(identity)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        init_std: float,
        share: Share | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.init_std = init_std
        self.share = share
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.share is None:
            nn.init.normal_(self.weight, std=self.init_std)
        else:
            dim, rank, size = self.share
            whole = torch.cat([torch.empty_like(self.weight)] * size, dim=dim)
            with torch.no_grad():
                self.weight.copy_(whole.normal_(std=self.init_std).chunk(size, dim)[rank])
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def local_weight(self, part: Callable[[Tensor], Tensor] = identity) -> Tensor:
        """This rank's weight, or the part of it that `part` cuts out."""
        return self.local(self.weight, part)

    def local_bias(self) -> Tensor | None:
        return None if self.bias is None else self.sum_bias_gradient(local_tensor(self.bias))

    def recomputable_parameters(self) -> tuple[Tensor, ...]:
        """The parameters that a forward reads, for who runs it again in backward.

        Raises:
            ValueError: where another run would give other values.
        """
        return tuple(self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.local_weight())

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def obstacle_to_bypassing(linear: nn.Module) -> str | None:
    """What somebody would miss if a weight were used without a call of its layer; None where nothing."""
    return watcher(linear) if type(linear) is Linear else f"is a {type(linear).__name__}"


def watcher(module: nn.Module) -> str | None:
    """Who else takes part in a call of a module: None where nobody does."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "has hooks"
    if torch.compiler.is_compiling():
        return None
    if torch.nn.modules.module._has_any_global_hook():
        return "is watched by hooks of all modules"
    return "has a forward of its own" if "forward" in vars(module) else None


class RMSNorm(LocalParameters):
    """y = x / sqrt(mean(x^2) + eps) * weight, in fp32 at least, rounded to x's dtype."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.local(self.weight), self.eps)

    def normed(self, x: Tensor) -> Tensor:
        """The normed values behind what `forward` answered: itself. (A back end may leave the norm to the projection
        behind, and `forward` is then the identity.)"""
        return x

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class LayerNorm(LocalParameters):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, in fp32 at least, rounded to x's dtype."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), self.local(self.weight), self.local(self.bias), self.eps)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class TorchLayers:
    """Builds the layers of `backend="torch"`."""

    name = "torch"

    def __init__(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype

    def linear(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        init_std: float,
        share: Share | None = None,
        norm: RMSNorm | None = None,
    ) -> Linear:
        """A linear layer; a back end may let it apply the `norm` in front of it. This one does not."""
        return Linear(
            in_features, out_features, bias=bias, init_std=init_std, share=share, device=self.device, dtype=self.dtype
        )

    def rms_norm(self, width: int, eps: float) -> RMSNorm:
        return RMSNorm(width, eps, device=self.device, dtype=self.dtype)

    def layer_norm(self, width: int, eps: float) -> LayerNorm:
        return LayerNorm(width, eps, device=self.device, dtype=self.dtype)
