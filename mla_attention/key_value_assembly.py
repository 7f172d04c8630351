"""How key and value come out of the latent: up-projection, rotation of the shared key, layout.

`split` runs one GEMM into a kv buffer `[.., n, Dn+Dv]` and cuts it into key and value, the rotated shared key beside
every head.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from mla_attention import fusions
from mla_attention.configs import MLAConfig
from mla_attention.fusions import reference
from mla_attention.layers.torch_layers import Linear
from mla_attention.token_layout import TokenLayout


class SplitAssembly:
    """Key and value cut from one GEMM's output by the (fused or unfused) key/value split."""

    name = "split"

    def __init__(self, config: MLAConfig) -> None:
        self.fused_rope = config.apply_rope_fusion
        self.dims = (config.qk_pos_emb_head_dim, config.qk_head_dim, config.v_head_dim)

    @property
    def rope(self) -> ModuleType:
        """The rotary functions, fused or their unfused twins."""
        return fusions if self.fused_rope else reference

    def __call__(self, kv_latent: Tensor, k_pe: Tensor, up_proj: Linear, tokens: TokenLayout) -> tuple[Tensor, Tensor]:
        """Key and value of every head.

        Args:
            kv_latent: normed `[S, B, Rkv]`, packed `[T, Rkv]`.
            k_pe: shared rotary key, not yet rotated, `[S, B, Dr]`, packed `[T, Dr]`.
            up_proj: `linear_kv_up_proj`.
            tokens: layout of the key rows.

        Returns:
            key `[.., n, Dn+Dr]`, value `[.., n, Dv]`.
        """
        _, k_dim, v_dim = self.dims
        kv = up_proj(kv_latent)
        kv = kv.view(*kv.shape[:-1], -1, k_dim + v_dim)
        return self.rope.fused_apply_mla_rope_for_kv(
            kv, k_pe.unsqueeze(-2), tokens.cos, tokens.sin, *self.dims, tokens.cu_seqlens, **tokens.rope_arguments()
        )


def build_assembly(config: MLAConfig) -> SplitAssembly:
    """The assembly that a config asks for, with the fused or the unfused rotary functions."""
    return SplitAssembly(config)
