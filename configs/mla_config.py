"""What one multi-head latent attention layer is: :class:`MLAConfig`."""

import dataclasses
import functools
from typing import Any, TypeVar

from .errors import ConfigError, refuse_unknown_fields
from .validation import validate

__all__ = ["MLAConfig", "field_names"]

_T = TypeVar("_T")


def _checked_keywords(cls: type[_T]) -> type[_T]:
    """Make a dataclass raise :class:`ConfigError` for unknown keywords, then for missing ones, not a TypeError."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    known = [field.name for field in fields]
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        refuse_unknown_fields(cls.__name__, given, known)
        missing = [name for name in required if name not in given]
        if missing and not args:
            raise ConfigError(f"{' and '.join(missing)} must be given to {cls.__name__} (a positive int), got nothing")
        generated(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_checked_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Immutable description of one MLA layer, validated when built.

    Dims: N ``num_attention_heads``, Rq ``q_lora_rank``, Rkv ``kv_lora_rank``, Dn ``qk_head_dim`` (without the rotary
    part; Hugging Face's ``qk_head_dim`` is Dn + Dr), Dr ``qk_pos_emb_head_dim``, Dv ``v_head_dim``; the indexer has
    Hi ``dsa_indexer_n_heads`` heads of width Di ``dsa_indexer_head_dim`` and keeps K ``dsa_indexer_topk`` keys a query.

    Use ``dataclasses.replace(config, field=value)`` for a variation. Instances compare and hash by value, and pickle.

    Raises:
        ConfigError: one line with the field, the value given and the values allowed. Unknown keywords are reported
            first, then missing ones, then values.

    Source:
        Field names follow Megatron-LM's ``MLATransformerConfig`` and ``TransformerConfig`` where those have the field.
    """

    # -- size
    hidden_size: int
    num_attention_heads: int
    num_layers: int = 1
    """Layers of the whole model; scales the initial output projection by 1/sqrt(2 * num_layers)."""
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    """None: the query is projected from the hidden state directly, without compression."""
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    # -- rotary embedding and softmax scale
    rope_type: str = "yarn"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    rope_truncate: bool = True
    """Round the YaRN correction range outwards to whole channel pairs."""
    rope_attention_factor: float | None = None
    """Multiplier of the cos and sin tables; None: g(factor, mscale) / g(factor, mscale_all_dim)."""
    softmax_scale: float | None = None
    """None: g(factor, mscale_all_dim)^2 / sqrt(Dn + Dr), with g only for yarn."""
    apply_rope_fusion: bool = False
    rotary_interleaved: bool = False

    # -- layer
    layernorm_epsilon: float = 1e-6
    """Epsilon of the two latent norms (Hugging Face hard-codes 1e-6 there, whatever ``rms_norm_eps`` says)."""
    add_bias_linear: bool = False
    attention_dropout: float = 0.0
    core_attention_backend: str = "auto"
    cp_comm_type: str | None = None
    """How context-parallel ranks meet each other's keys. None: the key latents are gathered before core attention.
    "p2p" (a ring), "all_gather" or "a2a" (all rows of some heads for some rows of all heads): Transformer Engine's core
    attention exchanges keys and values. Without context parallelism there is nothing to exchange."""
    kv_assembly: str = "auto"
    """How key and value are put together: "split" of one projection, "gemm" writing them in place, or "auto"."""
    recompute_up_proj: bool = False
    mla_down_proj_fusion: bool = False
    qk_clip: bool = False
    qk_clip_threshold: float = 100.0
    qk_clip_alpha: float = 0.5
    init_method_std: float = 0.02
    calculate_per_token_loss: bool = False

    # -- sparse attention
    experimental_attention_variant: str | None = None
    """None: dense attention; "dsa": indexer and absorbed sparse attention."""
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_rope_interleaved: bool = False
    """Rotary pairing of the indexer alone: DeepSeek-V3.2 half-split (False), GLM-5 interleaved (True)."""
    dsa_indexer_rotate_activation: bool = False
    dsa_indexer_scoring_relu: bool = True
    dsa_indexer_k_norm_epsilon: float = 1e-6
    dsa_indexer_loss_coeff: float = 0.0
    dsa_indexer_use_sparse_loss: bool = False
    dsa_indexer_shared: bool = False
    """The layer has no indexer and takes ``topk_indices`` from an earlier layer."""
    dsa_mode: str = "sparse"
    dsa_score_budget_bytes: int = 2**30

    def __post_init__(self) -> None:
        validate(self)


def field_names() -> tuple[str, ...]:
    """Names of all fields of :class:`MLAConfig`, in the order of declaration."""
    return tuple(field.name for field in dataclasses.fields(MLAConfig))
