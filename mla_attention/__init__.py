"""Multi-head latent attention for DeepSeek- and GLM-5-shaped layers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_attention.attention import MLASelfAttention, should_use_fused_mla_rope
from mla_attention.latent_cache import LatentCache
from mla_attention.packed import PackedSeqParams
from mla_attention.rotary import RotaryEmbedding, YarnRotaryEmbedding

if TYPE_CHECKING:
    from mla_attention.parallel.apply import parallelize
    from mla_attention.parallel.context import gather_sequence_from_cp, shard_sequence_for_cp

_LAZY = {  # what a single rank has no use for: DTensor and FSDP take a second to import
    "parallelize": "mla_attention.parallel.apply",
    "gather_sequence_from_cp": "mla_attention.parallel.context",
    "shard_sequence_for_cp": "mla_attention.parallel.context",
}

__all__ = [
    "LatentCache",
    "MLASelfAttention",
    "PackedSeqParams",
    "RotaryEmbedding",
    "YarnRotaryEmbedding",
    "gather_sequence_from_cp",
    "parallelize",
    "shard_sequence_for_cp",
    "should_use_fused_mla_rope",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
