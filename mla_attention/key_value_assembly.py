"""How key and value come out of the latent: up-projection, rotation of the shared key, layout.

`split` runs one GEMM into a kv buffer `[.., n, Dn+Dv]`, which is then cut into key and value with the rotated shared
key beside every head.

`gemm` has no kv buffer: one batched GEMM writes k_nope into `key[..., :Dn]`, another writes value, and a small kernel
fills in the rotated shared key. Backward reads dkey where it lies, as a strided operand. Less is moved (the split reads
and writes all of key and value once more, forward and backward) and less is kept.

`auto` takes `gemm` on CUDA wherever the up-projection is a plain linear whose output nobody asks for, else `split`.
Measured on an H200, bf16: `benchmarks/layer.py`.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mla_attention import fusions
from mla_attention.configs import MLAConfig
from mla_attention.fusions import reference
from mla_attention.layers.torch_layers import Linear
from mla_attention.token_layout import TokenLayout


class KeyValueAssembly:
    """Key and value of every head from the latent, by the way that `config.kv_assembly` names."""

    def __init__(self, config: MLAConfig) -> None:
        self.name = config.kv_assembly
        self.fused_rope = config.apply_rope_fusion
        self.k_dim = config.qk_head_dim
        self.emb_dim = config.qk_pos_emb_head_dim
        self.v_dim = config.v_head_dim

    @property
    def rope(self) -> ModuleType:
        """The rotary functions: fused, or their unfused twins."""
        return fusions if self.fused_rope else reference

    def __call__(self, kv_latent: Tensor, k_pe: Tensor, up_proj: Linear, tokens: TokenLayout) -> tuple[Tensor, Tensor]:
        """Key and value.

        Args:
            kv_latent: normed `[S, B, Rkv]`, packed `[T, Rkv]`.
            k_pe: shared rotary key, not yet rotated, `[S, B, Dr]`, packed `[T, Dr]`.
            up_proj: `linear_kv_up_proj`.
            tokens: layout of the key rows.

        Returns:
            key `[.., n, Dn+Dr]`, value `[.., n, Dv]`.

        Raises:
            ValueError: if "gemm" is forced where the up-projection cannot be bypassed.
        """
        if self._way(kv_latent, up_proj) == "split":
            return self._split(kv_latent, k_pe, up_proj, tokens)
        weight = up_proj.local_weight()
        if torch.is_autocast_enabled(kv_latent.device.type):
            dtype = torch.get_autocast_dtype(kv_latent.device.type)
            kv_latent, k_pe, weight = kv_latent.to(dtype), k_pe.to(dtype), weight.to(dtype)
        return _UpProjectInPlace.apply(kv_latent, k_pe.unsqueeze(-2), weight, self, tokens)

    def _way(self, kv_latent: Tensor, up_proj: Linear) -> str:
        if self.name == "split":
            return "split"
        obstacle = None
        if type(up_proj) is not Linear:
            obstacle = f"linear_kv_up_proj is a {type(up_proj).__name__}"
        elif up_proj._forward_hooks or up_proj._forward_pre_hooks:
            obstacle = "linear_kv_up_proj has forward hooks"
        if self.name == "gemm":
            if obstacle:
                raise ValueError(f"kv_assembly: given 'gemm', but {obstacle}; allowed are 'auto' and 'split'")
            return "gemm"
        return "gemm" if kv_latent.is_cuda and obstacle is None else "split"

    def _split(self, kv_latent: Tensor, k_pe: Tensor, up_proj: Linear, tokens: TokenLayout) -> tuple[Tensor, Tensor]:
        kv = up_proj(kv_latent)
        kv = kv.unflatten(-1, (kv.shape[-1] // (self.k_dim + self.v_dim), self.k_dim + self.v_dim))
        return self.rope.fused_apply_mla_rope_for_kv(
            kv,
            k_pe.unsqueeze(-2),
            tokens.cos,
            tokens.sin,
            self.emb_dim,
            self.k_dim,
            self.v_dim,
            tokens.cu_seqlens,
            **tokens.rope_arguments(),
        )


class _UpProjectInPlace(torch.autograd.Function):
    """latent `[.., R]`, shared key `[.., 1, Dr]`, weight `[n*(Dn+Dv), R]` -> key, value, written where they belong."""

    @staticmethod
    def forward(ctx, latent: Tensor, k_pe: Tensor, weight: Tensor, assembly: KeyValueAssembly, tokens: TokenLayout):
        k_dim, emb_dim, v_dim = assembly.k_dim, assembly.emb_dim, assembly.v_dim
        per_head = weight.view(-1, k_dim + v_dim, weight.shape[-1])  # [n, Dn+Dv, R]
        heads, lead = per_head.shape[0], latent.shape[:-1]
        key = latent.new_empty(*lead, heads, k_dim + emb_dim)
        value = latent.new_empty(*lead, heads, v_dim)
        rows = latent.reshape(-1, latent.shape[-1])
        every_head = rows.expand(heads, *rows.shape)  # [n, T, R]
        torch.bmm(every_head, per_head[:, :k_dim].mT, out=_heads_first(key)[..., :k_dim])
        torch.bmm(every_head, per_head[:, k_dim:].mT, out=_heads_first(value))
        assembly.rope.rotate_shared_key_into(
            key, k_pe, tokens.cos, tokens.sin, tokens.cu_seqlens, **tokens.rope_arguments()
        )
        ctx.save_for_backward(latent, weight)
        ctx.assembly, ctx.tokens = assembly, tokens
        return key, value

    @staticmethod
    @once_differentiable
    def backward(ctx, dkey: Tensor, dvalue: Tensor):
        latent, weight = ctx.saved_tensors
        assembly, tokens = ctx.assembly, ctx.tokens
        k_dim, emb_dim, v_dim = assembly.k_dim, assembly.emb_dim, assembly.v_dim
        per_head = weight.view(-1, k_dim + v_dim, weight.shape[-1])
        dkey, dvalue = dkey.contiguous(), dvalue.contiguous()
        dlatent = dk_pe = dweight = None
        if ctx.needs_input_grad[1]:
            dk_pe = assembly.rope.shared_key_gradient(
                dkey, tokens.cos, tokens.sin, tokens.cu_seqlens, **tokens.rope_arguments()
            )
        if ctx.needs_input_grad[0]:
            # dK goes through one flat GEMM as it lies, its rope channels meeting rows of zeros.
            key_rows = torch.nn.functional.pad(per_head[:, :k_dim], (0, 0, 0, emb_dim)).flatten(0, 1)
            dlatent = dvalue.view(-1, dvalue.shape[-2] * v_dim) @ per_head[:, k_dim:].flatten(0, 1)
            dlatent = torch.addmm(dlatent, dkey.view(-1, key_rows.shape[0]), key_rows).view_as(latent)
        if ctx.needs_input_grad[2]:
            rows = latent.reshape(-1, latent.shape[-1])
            every_head = rows.expand(per_head.shape[0], *rows.shape)
            dweight = torch.empty_like(per_head)
            torch.bmm(_heads_first(dkey)[..., :k_dim].mT, every_head, out=dweight[:, :k_dim])
            torch.bmm(_heads_first(dvalue).mT, every_head, out=dweight[:, k_dim:])
            dweight = dweight.view_as(weight)
        return dlatent, dk_pe, dweight, None, None


def _heads_first(tensor: Tensor) -> Tensor:
    """View `[.., n, D]` as `[n, T, D]`."""
    return tensor.view(-1, *tensor.shape[-2:]).transpose(0, 1)
