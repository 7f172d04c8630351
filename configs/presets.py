"""Published layers as functions: ``name(**overrides) -> MLAConfig``.

The numbers are those of each model's ``config.json`` on the Hugging Face hub (repository named in the function).
The latent norms' epsilon is 1e-6 in all of them: the published modelling code hard-codes it there, ``rms_norm_eps``
(1e-5 for GLM-5) belongs to the other norms.
"""

from collections.abc import Callable, Mapping

from .errors import ConfigError, refuse_unknown_fields
from .mla_config import MLAConfig, field_names
from .validation import DSA_FIELDS, YARN_FIELDS

__all__ = [
    "PRESETS",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v32",
    "get_preset",
    "glm5",
    "kimi_k2",
    "tiny",
    "with_overrides",
]


def with_overrides(owner: str, base: Mapping[str, object], overrides: Mapping[str, object]) -> MLAConfig:
    """Build a config from base values and a caller's overrides.

    ``experimental_attention_variant=None`` among the overrides resets the base's dsa fields, ``rope_type="rope"`` its
    YaRN fields; fields that the caller sets along with them are kept, and validated as usual.

    Args:
        owner: the function called, for error messages.
        base: field values of the preset or of a model's config.
        overrides: field values of the caller; they win.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: an override is not a field, or a rule is broken.
    """
    refuse_unknown_fields(owner, overrides, field_names())
    reset: set[str] = set()
    if overrides.get("experimental_attention_variant", "") is None:
        reset.update(DSA_FIELDS)
    if overrides.get("rope_type") == "rope":
        reset.update(YARN_FIELDS)
    values = {name: value for name, value in base.items() if name not in reset}
    return MLAConfig(**{**values, **overrides})  # type: ignore[arg-type]


# V2 and later: beta_fast 32, beta_slow 1, 4096 trained positions, base 10000 -- rope_scaling of each config.json.
_DEEPSEEK_YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rotary_base": 10000.0,
    "rotary_scaling_factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

# qk_nope_head_dim, qk_rope_head_dim, v_head_dim and kv_lora_rank shared by DeepSeek-V2 to V3.2 and Kimi-K2.
_DEEPSEEK_HEADS: dict[str, object] = {
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}


def tiny(**overrides: object) -> MLAConfig:
    """A layer for tests and CPUs: small, with Dn, Dr and Dv all different. Softmax scale 0.204991.

    Source: made up; YaRN of DeepSeek-V3 with a smaller factor.
    """
    base: dict[str, object] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_head_dim": 24,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 20,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return with_overrides("tiny", base, overrides)


def deepseek_v2_lite(**overrides: object) -> MLAConfig:
    """DeepSeek-V2-Lite, no query compression. Softmax scale 0.114721.

    Source: deepseek-ai/DeepSeek-V2-Lite config.json.
    """
    base = {
        **_DEEPSEEK_HEADS,
        **_DEEPSEEK_YARN,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_layers": 27,
        "q_lora_rank": None,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    return with_overrides("deepseek_v2_lite", base, overrides)


def deepseek_v2(**overrides: object) -> MLAConfig:
    """DeepSeek-V2 (236B). Softmax scale 0.114721.

    Source: deepseek-ai/DeepSeek-V2 config.json.
    """
    base = {
        **_DEEPSEEK_HEADS,
        **_DEEPSEEK_YARN,
        "hidden_size": 5120,
        "num_attention_heads": 128,
        "num_layers": 60,
        "q_lora_rank": 1536,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    return with_overrides("deepseek_v2", base, overrides)


def deepseek_v3(**overrides: object) -> MLAConfig:
    """DeepSeek-V3, V3.1 and R1 (671B). Softmax scale 0.135234.

    Source: deepseek-ai/DeepSeek-V3 config.json.
    """
    return with_overrides("deepseek_v3", _deepseek_v3_base(), overrides)


def deepseek_v32(**overrides: object) -> MLAConfig:
    """DeepSeek-V3.2: V3 with the sparse-attention indexer, its rotary channels half-split. Softmax scale 0.135234.

    Source: deepseek-ai/DeepSeek-V3.2-Exp config.json; the pairing from its inference/model.py.
    """
    base = {
        **_deepseek_v3_base(),
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 64,  # index_n_heads
        "dsa_indexer_head_dim": 128,  # index_head_dim
        "dsa_indexer_topk": 2048,  # index_topk
        "dsa_indexer_rope_interleaved": False,
    }
    return with_overrides("deepseek_v32", base, overrides)


def kimi_k2(**overrides: object) -> MLAConfig:
    """Kimi-K2-Instruct. Softmax scale 0.130861.

    Kimi-K2-Instruct-0905 and K2.5 have factor 64: ``kimi_k2(rotary_scaling_factor=64.0)``, softmax scale 0.144680.

    Source: moonshotai/Kimi-K2-Instruct config.json.
    """
    base = {
        **_DEEPSEEK_HEADS,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_layers": 61,
        "q_lora_rank": 1536,
        "rope_type": "yarn",
        "rotary_base": 50000.0,
        "rotary_scaling_factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return with_overrides("kimi_k2", base, overrides)


def glm5(**overrides: object) -> MLAConfig:
    """GLM-5 and GLM-5.1: wide heads, plain rotary embedding, an indexer with interleaved pairs. Softmax scale 0.0625.

    GLM-5.2 has base 8e6 and layers that share an indexer: ``glm5(rotary_base=8e6, dsa_indexer_shared=True)``.

    Source: zai-org/GLM-5 config.json; the indexer's pairing from transformers' glm_moe_dsa.
    """
    base: dict[str, object] = {
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_layers": 78,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_head_dim": 192,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 256,
        "rope_type": "rope",
        "rotary_base": 1e6,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 32,  # index_n_heads
        "dsa_indexer_head_dim": 128,  # index_head_dim
        "dsa_indexer_topk": 2048,  # index_topk
        "dsa_indexer_rope_interleaved": True,
    }
    return with_overrides("glm5", base, overrides)


def _deepseek_v3_base() -> dict[str, object]:
    return {
        **_DEEPSEEK_HEADS,
        **_DEEPSEEK_YARN,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_layers": 61,
        "q_lora_rank": 1536,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


_BUILDERS: dict[str, Callable[..., MLAConfig]] = {
    "tiny": tiny,
    "deepseek_v2_lite": deepseek_v2_lite,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "kimi_k2": kimi_k2,
    "glm5": glm5,
}

PRESETS: tuple[str, ...] = tuple(_BUILDERS)
"""Names that :func:`get_preset` knows."""


def get_preset(name: str, **overrides: object) -> MLAConfig:
    """Build the preset of that name.

    Args:
        name: one of :data:`PRESETS`.
        overrides: fields of :class:`MLAConfig` that differ from the published layer.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: no such preset, or as for the preset function itself.
    """
    builder = _BUILDERS.get(name) if isinstance(name, str) else None
    if builder is None:
        raise ConfigError(f"name must be one of {', '.join(PRESETS)}, got {name!r}")
    return builder(**overrides)
