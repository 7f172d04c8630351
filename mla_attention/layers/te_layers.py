"""Linear and norm layers of Transformer Engine, under the interface and the parameter names of `torch_layers`.

Each class is Transformer Engine's own, so that `te.autocast` and whatever else looks for its modules finds them. The
parameters are made here: on any device, drawn as those of the torch layers are, and used through `local`, so that
DTensor shards and gradient sums over ranks work the same.

Under `te.autocast` the linear layers compute in FP8 with its recipe. What reads weights by itself does not: the
absorbed form of sparse attention and of generation, the fused down projections, and the sums of `clip_qk`.

Modules have no `_extra_state`: state dicts are those of the torch layers, key by key. The scaling history of a delayed
FP8 recipe is therefore not stored; it starts anew after loading, and in a copy or a pickle.

Source: Transformer Engine 2.20.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mla_attention.layers.te_import import import_te, te_version
from mla_attention.layers.torch_layers import (
    LayerNorm,
    Linear,
    LocalParameters,
    RMSNorm,
    Share,
    TorchLayers,
    identity,
    local_tensor,
)

te: Any = import_te()

_FP8_WIDTHS = 16  # features in and out of an FP8 GEMM are multiples of this
_FP8_ROWS = 32  # and its rows of this, which the block-scaled recipes want (16 would do for the others)


def fp8_is_enabled() -> bool:
    """Whether this code runs under `te.autocast`."""
    return te.quantization.FP8GlobalStateManager.is_fp8_enabled()


class _Stateless:
    """A Transformer Engine module whose state dict holds its parameters and nothing else.

    torch takes a module whose `get_extra_state` is `nn.Module`'s for one that has none.
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state
    _load_from_state_dict = nn.Module._load_from_state_dict


class _EngineLinear(_Stateless, Linear):
    """What the two linear layers share; `engine` is the Transformer Engine class that they also are."""

    engine: type[nn.Module]

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
        if te.quantization.FP8GlobalStateManager.with_fp8_parameters():
            raise ValueError(
                "backend: given 'te' inside te.quantized_model_init, which keeps weights in FP8; "
                "allowed is te.autocast around the forward"
            )
        self._start_engine(in_features, out_features)
        self.init_std = init_std
        self.share = share
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()
        if fp8_is_enabled():
            self.check_fp8()

    def _start_engine(self, in_features: int, out_features: int, **options: Any) -> None:
        """Initialise the Transformer Engine side, without memory and without a bias: it is returned, not added."""
        own = set(vars(self)) | set(vars(nn.Module()))
        self.engine.__init__(self, in_features, out_features, bias=False, device="meta", **options)
        del self.bias  # Transformer Engine's stand-in for none
        self._engine_names = frozenset(vars(self)) - own

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw weight and bias anew; `defer_init` is Transformer Engine's, which then leaves them alone."""
        if not defer_init:
            Linear.reset_parameters(self)

    def check_fp8(self) -> None:
        """Refuse widths that FP8 cannot compute.

        Raises:
            ValueError: naming both widths and what is allowed.
        """
        out_features, in_features = local_tensor(self.weight).shape
        if out_features % _FP8_WIDTHS or in_features % _FP8_WIDTHS:
            raise ValueError(
                f"te.autocast: given FP8 for a linear layer of {in_features} features in and {out_features} out, "
                f"allowed are multiples of {_FP8_WIDTHS}"
            )

    def recomputable_parameters(self) -> tuple[Tensor, ...]:
        if fp8_is_enabled():
            raise ValueError(
                "recompute_up_proj: given True under te.autocast, where a recomputation would not give the same "
                "values; allowed is False"
            )
        return super().recomputable_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """`[.., in]` -> `[.., out]`; under FP8 rows are padded to the multiple that its GEMMs want."""
        if x.numel() == 0:
            return self._without_engine(x)
        if not fp8_is_enabled():
            return self.engine.forward(self, x)
        self.check_fp8()
        rows = math.prod(x.shape[:-1])
        if rows % _FP8_ROWS == 0:
            return self.engine.forward(self, x)
        padded = F.pad(x.flatten(0, -2), (0, 0, 0, -rows % _FP8_ROWS))
        return self.engine.forward(self, padded)[:rows].unflatten(0, x.shape[:-1])

    def _without_engine(self, x: Tensor) -> Tensor:
        return F.linear(x, self.local_weight())

    def _get_weight_tensors(self) -> list[Tensor]:  # where Transformer Engine asks for what it multiplies with
        return [self.local_weight()]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the Transformer Engine side, which holds unpicklable functions and places in global tables."""
        own = {name: value for name, value in vars(self).items() if name not in self._engine_names}
        return {**own, "widths": (self.in_features, self.out_features)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        widths = own.pop("widths")
        vars(self).update(own)
        self._start_engine(*widths)
        super().__setstate__(own)


class TELinear(_EngineLinear, te.Linear):
    """`te.Linear`."""

    engine = te.Linear


class TENormLinear(_EngineLinear, te.LayerNormLinear):
    """`te.LayerNormLinear`: an RMSNorm and the linear layer behind it in one, with the norm's own parameter.

    The norm then leaves its input alone (`deferred`), and this layer takes what the norm was given.

    Args:
        norm: the norm module, which stays where it is in the module tree.
    """

    engine = te.LayerNormLinear

    def __init__(self, norm: TERMSNorm, in_features: int, out_features: int, **options: Any) -> None:
        self._held = (norm,)  # in a tuple: not a submodule of this layer too
        super().__init__(in_features, out_features, **options)
        norm.deferred = norm.in_head_region = True

    def _start_engine(self, in_features: int, out_features: int, **options: Any) -> None:
        super()._start_engine(in_features, out_features, normalization="RMSNorm", eps=self._held[0].eps, **options)

    def register_parameter(self, name: str, param: nn.Parameter | None, **options: Any) -> None:
        """As ever, but for the norm's weight: that parameter is the norm module's."""
        if name != "layer_norm_weight":
            super().register_parameter(name, param, **options)

    @property
    def layer_norm_weight(self) -> Tensor:
        """The norm's weight as Transformer Engine reads it at each forward."""
        (norm,) = self._held
        return norm.local(norm.weight)

    def recomputable_parameters(self) -> tuple[Tensor, ...]:
        return (*super().recomputable_parameters(), *self._held[0].parameters())

    def _without_engine(self, x: Tensor) -> Tensor:
        return super()._without_engine(self._held[0].normed(x))


class _EngineNorm(_Stateless, LocalParameters):
    """What the norms share: Transformer Engine's kernel, or torch's where the weight is not simply the parameter.

    Transformer Engine's norms read their parameter themselves, so a DTensor, or a gradient summed over ranks, goes
    through torch.
    """

    engine: type[nn.Module]
    plain: type[nn.Module]
    weight: nn.Parameter

    def _normalise(self, x: Tensor) -> Tensor:
        simple = self.sum_gradient is identity and local_tensor(self.weight) is self.weight and x.is_cuda
        return (self.engine if simple and x.numel() else self.plain).forward(self, x)


class TERMSNorm(_EngineNorm, RMSNorm, te.RMSNorm):
    """`te.RMSNorm`; deferred, the identity, where a `TENormLinear` behind it applies it."""

    engine = te.RMSNorm
    plain = RMSNorm
    deferred = False

    def __init__(
        self, width: int, eps: float, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        te.RMSNorm.__init__(self, width, eps=eps, device="meta")
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        RMSNorm.reset_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.deferred else self._normalise(x)

    def normed(self, x: Tensor) -> Tensor:
        return self._normalise(x) if self.deferred else x

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', applied by the projection behind' if self.deferred else ''}"


class TELayerNorm(_EngineNorm, LayerNorm, te.LayerNorm):
    """`te.LayerNorm`."""

    engine = te.LayerNorm
    plain = LayerNorm

    def __init__(
        self, width: int, eps: float, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        te.LayerNorm.__init__(self, width, eps=eps, device="meta")
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        LayerNorm.reset_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        return self._normalise(x)


class TELayers(TorchLayers):
    """Builds the layers of `backend="te"`."""

    name = "te"

    def __init__(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(device, dtype)
        if not hasattr(te.Linear, "_get_weight_tensors") or not hasattr(te.LayerNormLinear, "_get_weight_tensors"):
            raise ValueError(
                f"backend: given 'te' with Transformer Engine {te_version()}, "
                "allowed are releases whose linear layers work as those of 2.20"
            )

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
        options: dict[str, Any] = dict(bias=bias, init_std=init_std, share=share, device=self.device, dtype=self.dtype)
        if isinstance(norm, TERMSNorm):
            return TENormLinear(norm, in_features, out_features, **options)
        return TELinear(in_features, out_features, **options)

    def rms_norm(self, width: int, eps: float) -> TERMSNorm:
        return TERMSNorm(width, eps, device=self.device, dtype=self.dtype)

    def layer_norm(self, width: int, eps: float) -> TELayerNorm:
        return TELayerNorm(width, eps, device=self.device, dtype=self.dtype)
