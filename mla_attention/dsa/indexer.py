"""The indexer: a small multi-query attention whose scores say which keys are worth attending to.

    q = rope(W_q q_latent) [.., Hi, Di]     k = rope(LayerNorm(W_k h)) [.., Di]     w = W_w h / sqrt(Hi Di) [.., Hi]
    I[s, t] = sum_h w[s, h] relu(q[s, h] . k[t])

RoPE turns the first Dr channels of q and k, paired half-split (DeepSeek-V3.2) or interleaved (GLM-5) whatever the main
attention does. It reads the normed query latent and the hidden states detached: no gradient leaves it.

Source: DeepSeek-V3.2 (lightning indexer); parameter names are those of Megatron-LM's DSAIndexer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mla_attention.communication import ONE_RANK, Communication
from mla_attention.configs import MLAConfig
from mla_attention.dsa.functions import rope_functions
from mla_attention.layers.torch_layers import TorchLayers
from mla_attention.token_layout import TokenLayout


class Indexed(NamedTuple):
    """What the indexer makes of the tokens of one forward; the keys are later joined by those of other tokens."""

    query: Tensor  # [S, B, Hi, Di], packed [T, Hi, Di]
    key: Tensor  # [keys, B, Di], packed [keys, Di]
    weights: Tensor  # [S, B, Hi], packed [T, Hi], fp32 at least, both scales applied


class Indexer(nn.Module):
    """Queries, keys and head weights whose scores pick each token's keys.

    Args:
        config: Hi, Di, Rq, H, Dr, the pairing, Hadamard and the norm's epsilon.
        layers: builder of linear and norm layers.
    """

    def __init__(self, config: MLAConfig, layers: TorchLayers) -> None:
        super().__init__()
        heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        if heads is None or width is None or config.q_lora_rank is None:
            raise ValueError("config: given one without an indexer, allowed is experimental_attention_variant='dsa'")
        self.config = config
        self.heads, self.width = heads, width
        std = config.init_method_std
        self.linear_wq_b = layers.linear(config.q_lora_rank, heads * width, init_std=std)
        self.linear_wk = layers.linear(config.hidden_size, width, init_std=std)
        self.k_norm = layers.layer_norm(width, config.dsa_indexer_k_norm_epsilon)
        self.linear_weights_proj = layers.linear(config.hidden_size, heads, init_std=std)

    def forward(self, hidden: Tensor, q_latent: Tensor, tokens: TokenLayout, comm: Communication = ONE_RANK) -> Indexed:
        """Indexer queries, keys and weights of each token.

        Args:
            hidden: `[S, B, H]`, packed `[T, H]`; this rank's slice of the rows under sequence parallelism.
            q_latent: normed query latent `[S, B, Rq]`, packed `[T, Rq]`, of all rows.
            tokens: layout of the rows.
            comm: gathers keys and weights of a slice, Di+Hi channels a token.
        """
        hidden, q_latent = hidden.detach(), q_latent.detach()
        query = self.linear_wq_b(q_latent)
        query = self._rotate(query.view(*query.shape[:-1], self.heads, self.width), tokens, self.linear_wq_b)
        key = self.linear_wk(hidden)
        key = self.k_norm(key).to(key.dtype)  # under autocast the norm answers in fp32
        key, weights = comm.to_every_rank(key, self.linear_weights_proj(hidden))
        key = self._rotate(key.unsqueeze(-2), tokens, self.k_norm).squeeze(-2)
        if self.config.dsa_indexer_rotate_activation:
            query, key = hadamard_transform(query), hadamard_transform(key)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32)) * (self.heads * self.width) ** -0.5
        return Indexed(query, key, weights)

    def _rotate(self, t: Tensor, tokens: TokenLayout, producer: nn.Module) -> Tensor:
        """`t` `[.., heads, Di]` rotated, in the producer's own memory unless a forward hook may have kept that."""
        rope = rope_functions(self.config)
        rotate = rope.fused_mla_rope_out_of_place if producer._forward_hooks else rope.fused_mla_rope_inplace
        return rotate(
            t,
            tokens.cos,
            tokens.sin,
            self.width - self.config.qk_pos_emb_head_dim,
            self.config.qk_pos_emb_head_dim,
            tokens.cu_seqlens,
            **tokens.rope_arguments(),
            rope_first=True,
            input_halves=not self.config.dsa_indexer_rope_interleaved,
        )

    def extra_repr(self) -> str:
        config = self.config
        pairing = "interleaved" if config.dsa_indexer_rope_interleaved else "half-split"
        return (
            f"heads={self.heads}, width={self.width}, rope={pairing}, relu={config.dsa_indexer_scoring_relu}, "
            f"hadamard={config.dsa_indexer_rotate_activation}"
        )


def hadamard_transform(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis: x H / sqrt(D), H[i, j] = (-1)^popcount(i & j).

    Leaves dot products as they are and spreads outliers over the channels. One GEMM with a matrix of +-1: its products
    are exact and are summed in fp32 on every device, where log2(D) butterflies in bf16 would round at each step.

    Args:
        x: floating `[.., D]`, D a power of two.

    Raises:
        ValueError: if D is no power of two.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"x: given a last axis of {width}, allowed are powers of two")
    index = torch.arange(width, device=x.device)
    parity = index[:, None] & index
    for shift in (16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    signs = (1 - 2 * (parity & 1)).to(x.dtype)
    return F.linear(x, signs) * width**-0.5
