"""How key and value come out of the latent: up-projection, rotation of the shared key, layout.

`split` runs one GEMM into a kv buffer `[.., n, Dn+Dv]`, which is then cut into key and value with the rotated shared
key beside every head.

`gemm` has no kv buffer: one batched GEMM writes k_nope into `key[..., :Dn]`, another writes value, and a small kernel
fills in the rotated shared key. Backward reads dkey where it lies, as a strided operand. Less is moved (the split reads
and writes all of key and value once more, forward and backward) and less is kept.

`auto` takes `gemm` on CUDA wherever the up-projection is a plain linear whose output nobody asks for, else `split`.
Its time over the split's on an H200, bf16 (`benchmarks/assembly.py`), up-projection included: forward 0.63 to 0.73;
backward 0.81 for 64 heads of 192/64/256, 0.85 for 128 heads of 128/64/128, 0.88 for 8 heads of 192/64/256. So the shape
does not change the choice.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from mla_attention import fusions
from mla_attention.argument_checks import as_autocast
from mla_attention.configs import MLAConfig
from mla_attention.fusions import reference
from mla_attention.fusions.once_differentiable import once_differentiable
from mla_attention.layers.torch_layers import Linear, obstacle_to_bypassing
from mla_attention.token_layout import TokenLayout
from mla_attention.up_projection_gemm import up_project_gradients, up_project_into


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
        return self.up_project(kv_latent, k_pe, up_proj.local_weight(), tokens)

    def up_project(self, kv_latent: Tensor, k_pe: Tensor, weight: Tensor, tokens: TokenLayout) -> tuple[Tensor, Tensor]:
        """Key and value, as `__call__`, of the heads whose rows `weight` `[n*(Dn+Dv), Rkv]` holds, by "gemm"."""
        kv_latent, k_pe, weight = as_autocast(kv_latent, k_pe, weight)
        return _UpProjectInPlace.apply(kv_latent, k_pe.unsqueeze(-2), weight, self, tokens)

    def _way(self, kv_latent: Tensor, up_proj: Linear) -> str:
        if self.name == "split":
            return "split"
        if self.name == "gemm":
            self.check(up_proj)
            return "gemm"
        return "gemm" if kv_latent.is_cuda and self._obstacle(up_proj) is None else "split"

    def check(self, up_proj: Linear) -> None:
        """Refuse a forced "gemm" where the up-projection cannot be bypassed.

        Raises:
            ValueError: naming what stands in the way.
        """
        obstacle = self._obstacle(up_proj)
        if self.name == "gemm" and obstacle:
            raise ValueError(f"kv_assembly: given 'gemm', but {obstacle}; allowed are 'auto' and 'split'")

    def _obstacle(self, up_proj: Linear) -> str | None:
        obstacle = obstacle_to_bypassing(up_proj)
        return None if obstacle is None else f"linear_kv_up_proj {obstacle}"

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
        heads = weight.shape[0] // (assembly.k_dim + assembly.v_dim)
        key = latent.new_empty(*latent.shape[:-1], heads, assembly.k_dim + assembly.emb_dim)
        value = latent.new_empty(*latent.shape[:-1], heads, assembly.v_dim)
        rows = latent.flatten(0, -2)
        up_project_into(rows, weight, key.flatten(0, -3), value.flatten(0, -3))
        where = (tokens.cos, tokens.sin, tokens.cu_seqlens)
        assembly.rope.rotate_shared_key_into(key, k_pe, *where, **tokens.rope_arguments())
        ctx.save_for_backward(latent, weight)
        ctx.assembly, ctx.tokens = assembly, tokens
        return key, value

    @staticmethod
    @once_differentiable
    def backward(ctx, dkey: Tensor, dvalue: Tensor):
        latent, weight = ctx.saved_tensors
        tokens = ctx.tokens
        dkey, dvalue = dkey.contiguous(), dvalue.contiguous()
        where = (tokens.cos, tokens.sin, tokens.cu_seqlens)
        dk_pe = ctx.assembly.rope.shared_key_gradient(dkey, *where, **tokens.rope_arguments())
        rows = latent.flatten(0, -2)
        dlatent, dweight = up_project_gradients(rows, weight, dkey.flatten(0, -3), dvalue.flatten(0, -3))
        return dlatent.view_as(latent), dk_pe, dweight, None, None
