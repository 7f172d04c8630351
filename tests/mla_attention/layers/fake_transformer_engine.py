"""A stand-in for Transformer Engine on the CPU, with the shape of its modules and none of its kernels.

It has what the layers here rely on: modules that register their parameters, draw them unless on the meta device, keep
an `_extra_state`, ask `_get_weight_tensors` for their weight, and answer with a view made inside an autograd Function.
"""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MODULES = ("transformer_engine", "transformer_engine.pytorch")
OURS = "mla_attention.layers.te_layers"  # holds the module that it was imported with
NO_BACKEND = (
    "No dot product attention backend is available for the provided inputs. Please run with NVTE_DEBUG=1 "
    "NVTE_DEBUG_LEVEL=2 to find out the reasons for disabling all backends."
)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.flatten(0, -2) @ weight.t()).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Fp8State:
    enabled = False
    parameters = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return cls.parameters


class _Module(nn.Module):
    def get_extra_state(self) -> Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: Tensor) -> None:
        raise AssertionError("no test here loads an extra state")


class Linear(_Module):
    def __init__(self, in_features, out_features, *, bias=True, device="cuda"):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("weight", nn.Parameter(torch.empty(out_features, in_features, device=device)), kind=0)
        self.bias = torch.Tensor()
        self.unpicklable = lambda: None
        self.scales = []
        self.reset_parameters(defer_init=device == "meta")

    def register_parameter(self, name, param, **options):
        super().register_parameter(name, param)

    def reset_parameters(self, defer_init=False):
        raise AssertionError("ours draws the parameters")

    def _get_weight_tensors(self):
        return [self.weight]

    def forward(self, x):
        assert x.numel()
        assert not Fp8State.enabled or x.shape[:-1].numel() % 16 == 0
        self.scales.append(1.0)
        return _Multiply.apply(self.prepared(x), self._get_weight_tensors()[0])

    def prepared(self, x):
        return x


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps=1e-5, normalization="LayerNorm", **options):
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm"
        self.eps = eps
        weight = nn.Parameter(torch.empty(in_features, device=options["device"]))
        self.register_parameter("layer_norm_weight", weight, kind=1)

    def prepared(self, x):
        return F.rms_norm(x, (self.in_features,), self.layer_norm_weight, self.eps)


class RMSNorm(_Module):
    def __init__(self, width, *, eps=1e-5, device=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device))


class LayerNorm(RMSNorm):
    def __init__(self, width, *, eps=1e-5, device=None):
        super().__init__(width, eps=eps, device=device)
        self.bias = nn.Parameter(torch.empty(width, device=device))


class DotProductAttention(_Module):
    """Records how it was built and called; knows one backend, or none where a test says so."""

    has_backend = True

    def __init__(self, heads, channels, *, attention_dropout, softmax_scale):
        super().__init__()
        self.heads, self.channels, self.scale = heads, channels, softmax_scale
        assert attention_dropout == 0.0

    def forward(self, query, key, value, *, qkv_format, attn_mask_type, **packing):
        if not self.has_backend:
            raise ValueError(NO_BACKEND)
        assert query.shape[-2:] == (self.heads, self.channels[0])
        assert value.shape[-1] == self.channels[1]
        if qkv_format == "sbhd":
            assert attn_mask_type == "causal"
            return self.attend(query, key, value).flatten(-2)
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        offsets = packing["cu_seqlens_q"]
        assert offsets.dtype == torch.int32
        assert packing["max_seqlen_q"] >= int(offsets.diff().max())
        outside = torch.arange(query.shape[0]) >= offsets[-1]  # neither output nor gradients are written there
        output = torch.full_like(value, torch.nan)
        for t in (query, key, value):
            t.register_hook(lambda grad: grad.masked_fill(outside[:, None, None], torch.nan))
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            here = slice(start, end)
            output[here] = self.attend(query[here, None], key[here, None], value[here, None])[:, 0]
        return output.flatten(-2)

    def attend(self, query, key, value):
        heads_first = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=self.scale).permute(2, 0, 1, 3)


def install(patch: pytest.MonkeyPatch, *, cudnn: tuple[int, ...] = (9, 19, 0)) -> ModuleType:
    """Put the stand-in where Transformer Engine would be imported from, on a machine that claims to have a GPU."""
    package, te = ModuleType(MODULES[0]), ModuleType(MODULES[1])
    package.__version__ = "2.20.2"
    package.__path__ = []
    package.pytorch = te
    for piece in (Linear, LayerNormLinear, RMSNorm, LayerNorm, DotProductAttention):
        setattr(te, piece.__name__, piece)
    te.quantization = SimpleNamespace(FP8GlobalStateManager=Fp8State)
    te.get_cudnn_version = lambda: cudnn
    for name, module in zip(MODULES, (package, te), strict=True):
        patch.setitem(sys.modules, name, module)
    patch.delitem(sys.modules, OURS, raising=False)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    return te


@contextmanager
def autocast():
    """As `te.autocast(enabled=True)`."""
    Fp8State.enabled = True
    try:
        yield
    finally:
        Fp8State.enabled = False
