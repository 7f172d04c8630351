import math

import pytest

from mla_attention.configs import PRESETS, ConfigError, MLAConfig, get_preset, glm5, kimi_k2, presets, tiny
from mla_attention.configs.validation import DSA_FIELDS, YARN_FIELDS

DEFAULT = MLAConfig(hidden_size=1, num_attention_heads=1)
PUBLISHED = [name for name in PRESETS if name != "tiny"]

# name: hidden, heads, layers, Rq, Rkv, Dn, Dr, Dv
DIMS = {
    "deepseek_v2_lite": (2048, 16, 27, None, 512, 128, 64, 128),
    "deepseek_v2": (5120, 128, 60, 1536, 512, 128, 64, 128),
    "deepseek_v3": (7168, 128, 61, 1536, 512, 128, 64, 128),
    "deepseek_v32": (7168, 128, 61, 1536, 512, 128, 64, 128),
    "kimi_k2": (7168, 64, 61, 1536, 512, 128, 64, 128),
    "glm5": (6144, 64, 78, 2048, 512, 192, 64, 256),
}
# name: rope type, base, factor, original length, beta fast, beta slow, mscale, mscale_all_dim
ROPE = {
    "deepseek_v2_lite": ("yarn", 1e4, 40.0, 4096, 32.0, 1.0, 0.707, 0.707),
    "deepseek_v2": ("yarn", 1e4, 40.0, 4096, 32.0, 1.0, 0.707, 0.707),
    "deepseek_v3": ("yarn", 1e4, 40.0, 4096, 32.0, 1.0, 1.0, 1.0),
    "deepseek_v32": ("yarn", 1e4, 40.0, 4096, 32.0, 1.0, 1.0, 1.0),
    "kimi_k2": ("yarn", 5e4, 32.0, 4096, 1.0, 1.0, 1.0, 1.0),
    "glm5": ("rope", 1e6, 1.0, 4096, 32.0, 1.0, 1.0, 0.0),
}
SOFTMAX_SCALE = {
    "deepseek_v2_lite": 0.114721,
    "deepseek_v2": 0.114721,
    "deepseek_v3": 0.135234,
    "deepseek_v32": 0.135234,
    "kimi_k2": 0.130861,
    "glm5": 0.0625,
    "tiny": 0.204991,
}
# name: heads, width, top-k, interleaved pairs
INDEXER = {"deepseek_v32": (64, 128, 2048, False), "glm5": (32, 128, 2048, True)}


def softmax_scale(config: MLAConfig) -> float:
    """The formula, written out a second time."""
    concentration = 1.0
    if config.rope_type == "yarn":
        concentration = 0.1 * config.mscale_all_dim * math.log(config.rotary_scaling_factor) + 1.0
    return concentration**2 / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)


def test_names() -> None:
    assert list(PRESETS) == ["tiny", *DIMS]


@pytest.mark.parametrize("name", PUBLISHED)
def test_dims(name: str) -> None:
    config = get_preset(name)
    assert (
        config.hidden_size,
        config.num_attention_heads,
        config.num_layers,
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_head_dim,
        config.qk_pos_emb_head_dim,
        config.v_head_dim,
    ) == DIMS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_rope(name: str) -> None:
    config = get_preset(name)
    assert (
        config.rope_type,
        config.rotary_base,
        config.rotary_scaling_factor,
        config.original_max_position_embeddings,
        config.beta_fast,
        config.beta_slow,
        config.mscale,
        config.mscale_all_dim,
    ) == ROPE[name]
    assert config.rope_truncate is True
    assert config.rope_attention_factor is None


@pytest.mark.parametrize("name", PRESETS)
def test_softmax_scale(name: str) -> None:
    config = get_preset(name)
    assert config.softmax_scale is None
    assert softmax_scale(config) == pytest.approx(SOFTMAX_SCALE[name], abs=5e-7)


@pytest.mark.parametrize("name", PUBLISHED)
def test_indexer(name: str) -> None:
    config = get_preset(name)
    assert config.experimental_attention_variant == ("dsa" if name in INDEXER else None)
    if name in INDEXER:
        assert (
            config.dsa_indexer_n_heads,
            config.dsa_indexer_head_dim,
            config.dsa_indexer_topk,
            config.dsa_indexer_rope_interleaved,
        ) == INDEXER[name]
        assert config.dsa_indexer_scoring_relu is True
        assert config.dsa_indexer_k_norm_epsilon == 1e-6


@pytest.mark.parametrize("name", PRESETS)
def test_latent_norm_epsilon_is_the_hard_coded_one(name: str) -> None:
    assert get_preset(name).layernorm_epsilon == 1e-6


@pytest.mark.parametrize("name", PRESETS)
def test_function_and_name_agree(name: str) -> None:
    assert getattr(presets, name)(num_layers=3) == get_preset(name, num_layers=3)


def test_later_kimi() -> None:
    assert softmax_scale(kimi_k2(rotary_scaling_factor=64.0)) == pytest.approx(0.144680, abs=5e-7)


def test_tiny_is_shape_honest() -> None:
    config = tiny()
    widths = {config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim}
    assert len(widths) == 3
    assert config.qk_pos_emb_head_dim <= 64
    assert config.num_attention_heads >= 4
    assert config.q_lora_rank is not None
    assert config.rope_type == "yarn"
    assert config.experimental_attention_variant is None


def test_tiny_takes_any_override() -> None:
    config = tiny(
        num_attention_heads=8,
        rope_type="rope",
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=64,
        dsa_indexer_topk=4,
    )
    assert config.num_attention_heads == 8
    assert config.dsa_indexer_topk == 4


@pytest.mark.parametrize("name", sorted(INDEXER))
def test_dense_layer_of_the_same_dims(name: str) -> None:
    sparse, dense = get_preset(name), get_preset(name, experimental_attention_variant=None)
    for field in DSA_FIELDS:
        assert getattr(dense, field) == getattr(DEFAULT, field)
    assert dense.experimental_attention_variant is None
    assert (dense.hidden_size, dense.v_head_dim, dense.q_lora_rank) == (
        sparse.hidden_size,
        sparse.v_head_dim,
        sparse.q_lora_rank,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_plain_rope_resets_the_yarn_fields(name: str) -> None:
    config = get_preset(name, rope_type="rope")
    for field in YARN_FIELDS:
        assert getattr(config, field) == getattr(DEFAULT, field)
    assert config.rotary_base == get_preset(name).rotary_base
    assert softmax_scale(config) == pytest.approx((config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5)


def test_fields_set_beside_a_reset_are_validated_not_dropped() -> None:
    with pytest.raises(ConfigError, match="dsa_indexer_topk must stay at its default None"):
        glm5(experimental_attention_variant=None, dsa_indexer_topk=64)
    with pytest.raises(ConfigError, match=r"rotary_scaling_factor must stay at its default 1\.0"):
        tiny(rope_type="rope", rotary_scaling_factor=40.0)


@pytest.mark.parametrize("name", PRESETS)
def test_unknown_override(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} has no field 'v_head_dims'.*'v_head_dim'$"):
        get_preset(name, v_head_dims=3)
    with pytest.raises(ConfigError, match=f"^{name} has no field 'v_head_dims'.*'v_head_dim'$"):
        getattr(presets, name)(v_head_dims=3, hidden_size=-1)


@pytest.mark.parametrize("name", ["glm", "DeepSeek-V3", "", None, 3, ["glm5"]])
def test_unknown_preset(name: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        get_preset(name)  # type: ignore[arg-type]
    assert str(refusal.value) == f"name must be one of {', '.join(PRESETS)}, got {name!r}"
