"""A stand-in for Transformer Engine on the CPU, with the shape of its modules and none of its kernels.

It has what the layers here rely on: modules that register their parameters, draw them unless on the meta device, keep
an `_extra_state`, ask `_get_weight_tensors` for their weight, and answer with a view made inside an autograd Function.

Under context parallelism its attention gathers keys and values, whatever the `cp_comm_type`, and holds the caller to
what each type demands of heads, lengths and offsets. Which rows a rank holds is written down here once more, after
Transformer Engine's `thd_partition_indices_kernel`.
"""

import math
import sys
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
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


class Stream:
    """A CUDA stream of a machine without CUDA."""

    def __init__(self, device=None):
        self.device = device


class _GatherRanks(torch.autograd.Function):
    """`[rows, ..]` of every rank, in rank order; their gradients summed and dealt out."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def rows_of_rank(offsets: list[int], rank: int, size: int) -> Tensor:
    """Rows of the whole that a rank holds: chunks r and 2*size-1-r of each sequence, sequence by sequence."""
    rows = []
    for start, end in pairwise(offsets):
        assert (end - start) % (2 * size) == 0
        chunks = torch.arange(start, end).chunk(2 * size) if end > start else ()
        rows += [chunks[i] for i in (rank, 2 * size - 1 - rank) if chunks]
    return torch.cat(rows) if rows else torch.arange(0)


class DotProductAttention(_Module):
    """Records how it was built and called; knows one backend, or none where a test says so."""

    has_backend = True
    exchange: tuple = ()  # arguments of set_context_parallel_group

    def __init__(self, heads, channels, *, attention_dropout, softmax_scale):
        super().__init__()
        self.heads, self.channels, self.scale = heads, channels, softmax_scale
        assert attention_dropout == 0.0

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        assert isinstance(cp_global_ranks, list)
        assert isinstance(cp_stream, Stream)
        self.exchange = (cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(self, query, key, value, *, qkv_format, attn_mask_type, **packing):
        if not self.has_backend:
            raise ValueError(NO_BACKEND)
        assert query.shape[-2:] == (self.heads, self.channels[0])
        assert value.shape[-1] == self.channels[1]
        if self.exchange:
            return self.attend_across_ranks(query, key, value, qkv_format, attn_mask_type, **packing).flatten(-2)
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

    def attend_across_ranks(self, query, key, value, qkv_format, attn_mask_type, **packing):
        group, ranks, _, comm_type = self.exchange
        size, rank = group.size(), group.rank()
        assert ranks == dist.get_process_group_ranks(group)
        assert comm_type in ("p2p", "all_gather", "a2a")
        assert comm_type != "a2a" or self.heads % math.lcm(2, size) == 0
        assert key.shape[:-1] == query.shape[:-1] == value.shape[:-1]
        assert all(t.is_contiguous() for t in (query, key, value))
        offsets = [0, query.shape[0] * size]
        if qkv_format == "sbhd":
            assert attn_mask_type == "causal"
            assert not packing
        else:
            assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
            assert packing["cu_seqlens_q"].dtype == torch.int32
            for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
                assert torch.equal(packing[name], packing["cu_seqlens_q"])
            assert packing["cu_seqlens_q_padded"] is packing["cu_seqlens_q"]  # else: padding between sequences
            offsets = packing["cu_seqlens_q"].tolist()
            assert offsets[-1] == query.shape[0] * size  # rows past the last offset count to the last sequence
            longest = packing["max_seqlen_q"]
            assert longest == packing["max_seqlen_kv"] >= int(packing["cu_seqlens_q"].diff().max())
            assert longest % (2 * size) == 0
            query, key, value = query[:, None], key[:, None], value[:, None]
        places = [rows_of_rank(offsets, r, size) for r in range(size)]
        own, all_rows = places[rank], torch.cat(places)
        sequence = torch.bucketize(torch.arange(offsets[-1]), torch.tensor(offsets[1:]), right=True)
        seen = (all_rows <= own[:, None]) & (sequence[all_rows] == sequence[own, None])
        keys, values = _GatherRanks.apply(key, group), _GatherRanks.apply(value, group)
        heads_first = (t.permute(1, 2, 0, 3) for t in (query, keys, values))
        output = F.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=self.scale).permute(2, 0, 1, 3)
        return output if qkv_format == "sbhd" else output[:, 0]

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
    patch.setattr(torch.cuda, "Stream", Stream)
    return te


@contextmanager
def autocast():
    """As `te.autocast(enabled=True)`."""
    Fp8State.enabled = True
    try:
        yield
    finally:
        Fp8State.enabled = False
