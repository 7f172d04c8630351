"""Multi-head latent attention for DeepSeek- and GLM-5-shaped layers."""

from mla_attention.attention import MLASelfAttention, should_use_fused_mla_rope
from mla_attention.latent_cache import LatentCache
from mla_attention.packed import PackedSeqParams
from mla_attention.rotary import RotaryEmbedding, YarnRotaryEmbedding

__all__ = [
    "LatentCache",
    "MLASelfAttention",
    "PackedSeqParams",
    "RotaryEmbedding",
    "YarnRotaryEmbedding",
    "should_use_fused_mla_rope",
]
