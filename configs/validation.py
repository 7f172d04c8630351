"""The rules a layer configuration keeps, each refused with one line: field, value given, values allowed."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from .mla_config import MLAConfig

__all__ = ["CORE_ATTENTION_BACKENDS", "CP_COMM_TYPES", "DSA_FIELDS", "YARN_FIELDS", "validate"]

CORE_ATTENTION_BACKENDS = ("auto", "sdpa", "varlen", "te", "flex", "reference")
CP_COMM_TYPES = ("p2p", "all_gather", "a2a")
"""Transformer Engine's, but for "a2a+p2p", which wants two process groups in place of one."""

YARN_FIELDS = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "rope_truncate",
    "rope_attention_factor",
)
"""Fields that only ``rope_type="yarn"`` reads."""

DSA_FIELDS = (
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_rope_interleaved",
    "dsa_indexer_rotate_activation",
    "dsa_indexer_scoring_relu",
    "dsa_indexer_k_norm_epsilon",
    "dsa_indexer_loss_coeff",
    "dsa_indexer_use_sparse_loss",
    "dsa_indexer_shared",
    "dsa_mode",
    "dsa_score_budget_bytes",
)
"""Fields that only ``experimental_attention_variant="dsa"`` reads."""


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _real(test: Callable[[float], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int | float) and _is_real(value) and test(value)


def _optional(test: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or test(value)


def _one_of(*allowed: str | None) -> tuple[Callable[[object], bool], str]:
    def test(value: object) -> bool:
        return (value is None or isinstance(value, str)) and value in allowed

    return test, "one of " + ", ".join(map(repr, allowed))


_POSITIVE_INT = (_is_positive_int, "a positive int")
_OPTIONAL_POSITIVE_INT = (_optional(_is_positive_int), "None or a positive int")
_POSITIVE_REAL = (_real(lambda value: value > 0), "a finite number > 0")
_OPTIONAL_POSITIVE_REAL = (_optional(_real(lambda value: value > 0)), "None or a finite number > 0")
_NON_NEGATIVE_REAL = (_real(lambda value: value >= 0), "a finite number >= 0")
_FLAG = (lambda value: isinstance(value, bool), "True or False")

# One line a field: what a single value has to satisfy, whatever the others are.
_FIELD_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "hidden_size": _POSITIVE_INT,
    "num_attention_heads": _POSITIVE_INT,
    "num_layers": _POSITIVE_INT,
    "kv_lora_rank": _POSITIVE_INT,
    "q_lora_rank": _OPTIONAL_POSITIVE_INT,
    "qk_head_dim": _POSITIVE_INT,
    "qk_pos_emb_head_dim": (
        lambda value: isinstance(value, int) and _is_positive_int(value) and value % 2 == 0,
        "a positive even int",
    ),
    "v_head_dim": _POSITIVE_INT,
    "rope_type": _one_of("rope", "yarn"),
    "rotary_base": (_real(lambda value: value > 1), "a finite number > 1"),
    "rotary_percent": (_real(lambda value: value == 1), "1.0 (MLA rotates all qk_pos_emb_head_dim channels)"),
    "rotary_scaling_factor": (_real(lambda value: value >= 1), "a finite number >= 1"),
    "original_max_position_embeddings": _POSITIVE_INT,
    "beta_fast": _POSITIVE_REAL,
    "beta_slow": _POSITIVE_REAL,
    "mscale": _NON_NEGATIVE_REAL,
    "mscale_all_dim": _NON_NEGATIVE_REAL,
    "rope_truncate": _FLAG,
    "rope_attention_factor": _OPTIONAL_POSITIVE_REAL,
    "softmax_scale": _OPTIONAL_POSITIVE_REAL,
    "apply_rope_fusion": _FLAG,
    "rotary_interleaved": (
        lambda value: value is False,
        "False (the pairs of published checkpoints are interleaved on the way in and come out in halves already)",
    ),
    "layernorm_epsilon": _POSITIVE_REAL,
    "add_bias_linear": _FLAG,
    "attention_dropout": (_real(lambda value: 0 <= value < 1), "a number in [0, 1)"),
    "core_attention_backend": _one_of(*CORE_ATTENTION_BACKENDS),
    "cp_comm_type": _one_of(None, *CP_COMM_TYPES),
    "kv_assembly": _one_of("auto", "split", "gemm"),
    "recompute_up_proj": _FLAG,
    "mla_down_proj_fusion": _FLAG,
    "qk_clip": _FLAG,
    "qk_clip_threshold": _POSITIVE_REAL,
    "qk_clip_alpha": (_real(lambda value: 0 <= value <= 1), "a number in [0, 1]"),
    "init_method_std": _NON_NEGATIVE_REAL,
    "calculate_per_token_loss": _FLAG,
    "experimental_attention_variant": _one_of(None, "dsa"),
    "dsa_indexer_n_heads": _OPTIONAL_POSITIVE_INT,
    "dsa_indexer_head_dim": _OPTIONAL_POSITIVE_INT,
    "dsa_indexer_topk": _OPTIONAL_POSITIVE_INT,
    "dsa_indexer_rope_interleaved": _FLAG,
    "dsa_indexer_rotate_activation": _FLAG,
    "dsa_indexer_scoring_relu": _FLAG,
    "dsa_indexer_k_norm_epsilon": _POSITIVE_REAL,
    "dsa_indexer_loss_coeff": _NON_NEGATIVE_REAL,
    "dsa_indexer_use_sparse_loss": _FLAG,
    "dsa_indexer_shared": _FLAG,
    "dsa_mode": _one_of("sparse", "dense_warmup"),
    "dsa_score_budget_bytes": _POSITIVE_INT,
}


def validate(config: "MLAConfig") -> None:
    """Check every rule of a layer configuration: single values first, then the ones that tie fields together.

    Args:
        config: the configuration, all fields set.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for name, (test, allowed) in _FIELD_RULES.items():
        value = getattr(config, name)
        if not test(value):
            raise ConfigError(f"{name} must be {allowed}, got {value!r}")
    _validate_rope(config)
    _validate_cp_comm_type(config)
    if config.mla_down_proj_fusion and config.q_lora_rank is None:
        raise ConfigError(
            "q_lora_rank must be a positive int with mla_down_proj_fusion=True (it fuses two projections), got None"
        )
    if config.experimental_attention_variant == "dsa":
        _validate_dsa(config)
    else:
        _refuse_unless_default(config, DSA_FIELDS, 'experimental_attention_variant="dsa"')


def _validate_rope(config: "MLAConfig") -> None:
    if config.rope_type == "rope":
        _refuse_unless_default(config, YARN_FIELDS, 'rope_type="yarn"')
    if config.beta_fast < config.beta_slow:
        raise ConfigError(f"beta_fast must be >= beta_slow ({config.beta_slow!r}), got {config.beta_fast!r}")


def _validate_cp_comm_type(config: "MLAConfig") -> None:
    given = config.cp_comm_type
    if given is None:
        return
    if config.experimental_attention_variant == "dsa":
        raise ConfigError(f'cp_comm_type must be None with experimental_attention_variant="dsa", got {given!r}')
    if config.core_attention_backend != "te":
        raise ConfigError(
            f"core_attention_backend must be 'te' with cp_comm_type={given!r} (it exchanges the keys itself), "
            f"got {config.core_attention_backend!r}"
        )
    if config.qk_clip:
        raise ConfigError(
            f"qk_clip must be False with cp_comm_type={given!r} (no rank then holds the keys of all), got True"
        )


def _validate_dsa(config: "MLAConfig") -> None:
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        if getattr(config, name) is None:
            raise ConfigError(f'{name} must be a positive int with experimental_attention_variant="dsa", got None')
    head_dim = config.dsa_indexer_head_dim or 0
    if head_dim < config.qk_pos_emb_head_dim:
        raise ConfigError(
            f"dsa_indexer_head_dim must be >= qk_pos_emb_head_dim ({config.qk_pos_emb_head_dim}), got {head_dim}"
        )
    if config.dsa_indexer_rotate_activation and head_dim & (head_dim - 1):
        raise ConfigError(
            f"dsa_indexer_head_dim must be a power of two with dsa_indexer_rotate_activation=True, got {head_dim}"
        )
    if config.q_lora_rank is None:
        raise ConfigError(
            'q_lora_rank must be a positive int with experimental_attention_variant="dsa" '
            "(the indexer reads the query latent), got None"
        )
    if config.attention_dropout != 0:
        raise ConfigError(
            f'attention_dropout must be 0.0 with experimental_attention_variant="dsa", got {config.attention_dropout!r}'
        )
    if config.qk_clip:
        raise ConfigError('qk_clip must be False with experimental_attention_variant="dsa", got True')


def _refuse_unless_default(config: "MLAConfig", names: tuple[str, ...], needed: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            raise ConfigError(f"{name} must stay at its default {defaults[name]!r} without {needed}, got {value!r}")
