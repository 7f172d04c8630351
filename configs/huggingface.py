"""Reader of Hugging Face model configs: one attention layer of a model's ``config.json`` as an :class:`MLAConfig`.

Facts about the format are those of transformers 5 (``modeling_rope_utils`` and the four model families); the rotary
tables and the softmax scale that follow from the result equal transformers'.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from .errors import ConfigError, refuse_unknown_fields
from .mla_config import MLAConfig, field_names
from .presets import with_overrides

__all__ = ["from_hf_config"]

_DENSE_MODELS = ("deepseek_v2", "deepseek_v3", "kimi_k2")
# model type -> pairing of the indexer's rotary channels where the config does not say (the model code fixes it)
_SPARSE_MODELS = {"deepseek_v32": False, "glm_moe_dsa": True}
_MULTIMODAL_MODELS = ("kimi_k25",)  # the layer is described by the nested text_config

# config.json key -> field, for what has to be there
_DIMS = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_INDEXER_DIMS = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
# ... and for what keeps the field's default when it is absent or null
_OPTIONAL = {
    "q_lora_rank": "q_lora_rank",
    "num_hidden_layers": "num_layers",
    "initializer_range": "init_method_std",
    "attention_dropout": "attention_dropout",
}
_YARN_ONLY_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "attention_factor",
)


class _PretrainedConfig(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def from_hf_config(
    config: Mapping[str, Any] | _PretrainedConfig, *, layer_idx: int | None = None, **overrides: Any
) -> MLAConfig:
    """Read the attention layer of a Hugging Face model config.

    The rotary settings come from ``rope_parameters`` or ``rope_scaling`` (``rope_type`` or ``type``) and from a flat
    ``rope_theta``. Not read, because they do not describe this layer: ``rms_norm_eps`` (the latent norms keep 1e-6),
    ``head_dim``, ``num_key_value_heads``, ``qk_head_dim`` (Dn + Dr there, only checked). A missing ``q_lora_rank``
    means no query compression.

    Multiplier of the rotary tables: ``attention_factor`` when given; with both mscale keys g(factor, mscale) /
    g(factor, mscale_all_dim); otherwise 0.1*ln(factor) + 1.

    Args:
        config: a dict as in ``config.json``, or a transformers config object; deepseek_v2, deepseek_v3, deepseek_v32,
            kimi_k2 (also as the ``text_config`` of kimi_k25) or glm_moe_dsa. Other keys are ignored.
        layer_idx: index of the layer, 0-based; decides ``dsa_indexer_shared`` where layers share an indexer
            (``indexer_types``, else ``index_topk_pattern``, else ``index_topk_freq`` and ``index_skip_topk_offset``).
            None: a layer with an indexer of its own.
        overrides: fields of :class:`MLAConfig` that win over what is read; as for presets,
            ``experimental_attention_variant=None`` gives the dense layer of the same dims.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: unknown model or rope type, missing or contradictory numbers, a layer this library does not have.

    Source: transformers ``modeling_rope_utils.py`` and ``configuration_*.py`` of the model families named above.
    """
    refuse_unknown_fields("from_hf_config", overrides, field_names())
    source = _layer_description(config)
    model_type = _model_type(source)
    _refuse_other_layers(source)

    values = _required(source, _DIMS, overrides)
    values.update({field: source[key] for key, field in _OPTIONAL.items() if source.get(key) is not None})
    values.update(_rope_fields(source))
    _check_layer_index(layer_idx, source)
    if model_type in _SPARSE_MODELS:
        values["experimental_attention_variant"] = "dsa"
        if overrides.get("experimental_attention_variant", "dsa") is not None:
            values.update(_required(source, _INDEXER_DIMS, overrides))
        interleaved = source.get("indexer_rope_interleave")
        values["dsa_indexer_rope_interleaved"] = _SPARSE_MODELS[model_type] if interleaved is None else interleaved
        values["dsa_indexer_shared"] = layer_idx is not None and _shares_indexer(layer_idx, source)
    return with_overrides("from_hf_config", values, overrides)


def _layer_description(config: Mapping[str, Any] | _PretrainedConfig) -> Mapping[str, Any]:
    """The dict that holds the layer's keys: the config itself, or the text part of a multimodal one."""
    source = config if isinstance(config, Mapping) else getattr(config, "to_dict", lambda: None)()
    if not isinstance(source, Mapping):
        raise ConfigError(f"config must be a dict or a transformers config, got {type(config).__name__}")
    nested = source.get("text_config")
    if nested is None:
        return source
    text = _layer_description(nested)
    return text if "model_type" in text else {"model_type": "deepseek_v3", **text}


def _model_type(source: Mapping[str, Any]) -> str:
    """The model family; without ``model_type`` a config that has no indexer is a dense one, any other is ambiguous."""
    allowed = (*_DENSE_MODELS, *_SPARSE_MODELS)
    model_type = source.get("model_type") or None
    if model_type is None and not any(key in source for key in _INDEXER_DIMS):
        return "deepseek_v3"
    if model_type in _MULTIMODAL_MODELS:
        raise ConfigError(f"text_config must be given for model_type {model_type!r}, got none")
    if model_type not in allowed:
        raise ConfigError(f"model_type must be one of {', '.join(allowed)}, got {model_type!r}")
    return str(model_type)


def _refuse_other_layers(source: Mapping[str, Any]) -> None:
    if source.get("attention_bias"):
        raise ConfigError(
            f"attention_bias must be False (only some projections would carry a bias), got {source['attention_bias']!r}"
        )
    if not source.get("rope_interleave", True):
        raise ConfigError(
            "rope_interleave must be True (rotary channels of the weights in interleaved pairs), "
            f"got {source['rope_interleave']!r}"
        )
    total = source.get("qk_head_dim")
    nope, rope = source.get("qk_nope_head_dim"), source.get("qk_rope_head_dim")
    if isinstance(total, int) and isinstance(nope, int) and isinstance(rope, int) and total != nope + rope:
        raise ConfigError(
            f"qk_head_dim {total} and qk_nope_head_dim {nope} + qk_rope_head_dim {rope} contradict each other; "
            f"allowed is qk_head_dim {nope + rope}"
        )


def _required(source: Mapping[str, Any], keys: Mapping[str, str], overrides: Mapping[str, Any]) -> dict[str, object]:
    """Values of ``keys`` by field name; each one has to be there, unless the caller overrides it."""
    fields: dict[str, object] = {}
    for key, field in keys.items():
        if field in overrides:
            continue
        if source.get(key) is None:
            raise ConfigError(f"{key} must be in the Hugging Face config (a positive int), got nothing")
        fields[field] = source[key]
    return fields


def _rope_fields(source: Mapping[str, Any]) -> dict[str, object]:
    rope = _rope_dict(source)
    fields: dict[str, object] = {"rotary_base": _rope_theta(source, rope)}
    partial = rope.get("partial_rotary_factor", source.get("partial_rotary_factor"))
    if partial is not None:
        fields["rotary_percent"] = partial

    rope_type = rope.get("rope_type", "default")
    if rope_type == "default":
        for key in _YARN_ONLY_KEYS:
            if key in rope:
                raise ConfigError(f"{key} must be absent with rope_type 'default' (yarn reads it), got {rope[key]!r}")
        return {**fields, "rope_type": "rope"}
    if rope_type != "yarn":
        raise ConfigError(f"rope_type must be 'default' or 'yarn', got {rope_type!r}")
    return {**fields, "rope_type": "yarn", **_yarn_fields(source, rope)}


def _rope_dict(source: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` and ``rope_scaling`` as one dict, the type as ``rope_type``; contradictions are refused."""
    merged: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = source.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name} must be a dict or null, got {given!r}")
        entries = dict(given)
        old_type = entries.pop("type", None)
        new_type = entries.setdefault("rope_type", old_type)
        if old_type is not None and new_type != old_type:
            raise ConfigError(f"{name}: rope_type {new_type!r} and type {old_type!r} contradict each other; give one")
        for key, value in entries.items():
            if value is None:
                continue
            if merged.setdefault(key, value) != value:
                raise ConfigError(
                    f"rope_parameters {key} {merged[key]!r} and rope_scaling {key} {value!r} contradict each other; "
                    "give one"
                )
    return merged


def _rope_theta(source: Mapping[str, Any], rope: Mapping[str, Any]) -> Any:
    flat, nested = source.get("rope_theta"), rope.get("rope_theta")
    if flat is None and nested is None:
        raise ConfigError("rope_theta must be given, flat or in rope_parameters (a number > 1), got nothing")
    if nested is None:
        return flat
    if flat is not None and flat != nested:
        warnings.warn(
            f"rope_theta is {nested!r} in rope_parameters and {flat!r} beside it; the nested {nested!r} is used",
            stacklevel=4,
        )
    return nested


def _yarn_fields(source: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, object]:
    flat_trained, trained = source.get("original_max_position_embeddings"), rope.get("original_max_position_embeddings")
    if flat_trained is not None and trained is not None and flat_trained != trained:
        raise ConfigError(
            f"original_max_position_embeddings {flat_trained!r} and the nested original_max_position_embeddings "
            f"{trained!r} contradict each other; give one"
        )
    longest = source.get("max_position_embeddings")
    trained = next((value for value in (trained, flat_trained, longest) if value is not None), None)
    if trained is None:
        raise ConfigError("original_max_position_embeddings must be given with rope_type 'yarn' (int > 0), got nothing")
    factor = rope.get("factor")
    if factor is None:
        if not _is_count(longest) or not _is_count(trained):
            raise ConfigError("factor must be given with rope_type 'yarn' (a number >= 1), got nothing")
        factor = longest / trained

    fields: dict[str, object] = {
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "rope_truncate": rope.get("truncate", True),
        "mscale": rope.get("mscale", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
    }
    if rope.get("attention_factor") is not None:
        fields["rope_attention_factor"] = rope["attention_factor"]
    elif not (rope.get("mscale") and rope.get("mscale_all_dim")) and ("mscale" in rope or "mscale_all_dim" in rope):
        # One key alone scales nothing in transformers' tables; our fields' ratio would.
        fields["rope_attention_factor"] = _plain_attention_factor(factor)
    return fields


def _plain_attention_factor(factor: object) -> float:
    """0.1*ln(factor) + 1, and 1 up to factor 1 (what is no number is refused by the config's own rules)."""
    return 0.1 * math.log(factor) + 1.0 if isinstance(factor, int | float) and factor > 1 else 1.0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_layer_index(layer_idx: object, source: Mapping[str, Any]) -> None:
    if layer_idx is None:
        return
    if not isinstance(layer_idx, int) or isinstance(layer_idx, bool) or layer_idx < 0:
        raise ConfigError(f"layer_idx must be None or an int >= 0, got {layer_idx!r}")
    layers = source.get("num_hidden_layers")
    if isinstance(layers, int) and layer_idx >= layers:
        raise ConfigError(f"layer_idx must be below num_hidden_layers ({layers}), got {layer_idx}")


def _shares_indexer(layer_idx: int, source: Mapping[str, Any]) -> bool:
    """Whether the layer takes its top-k from an earlier one, by the list of types, the pattern or the schedule."""
    name = "indexer_types" if source.get("indexer_types") is not None else "index_topk_pattern"
    types = source.get(name)
    if types is not None:
        if layer_idx >= len(types):
            raise ConfigError(f"layer_idx must be below the length of {name} ({len(types)}), got {layer_idx}")
        kind = {"F": "full", "S": "shared"}.get(types[layer_idx], types[layer_idx])
        if kind not in ("full", "shared"):
            raise ConfigError(f"{name}[{layer_idx}] must be 'full' or 'shared', got {types[layer_idx]!r}")
        return kind == "shared"
    every = _schedule_number(source, "index_topk_freq", default=1)
    first = _schedule_number(source, "index_skip_topk_offset", default=2)
    return max(layer_idx - first + 1, 0) % max(every, 1) != 0


def _schedule_number(source: Mapping[str, Any], key: str, *, default: int) -> int:
    value = source.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{key} must be an int >= 0, got {value!r}")
    return value
