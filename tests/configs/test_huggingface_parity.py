"""`from_hf_config` on transformers' own config objects: tables, softmax scale, indexers equal the modelling code's."""

import math

import pytest
import torch

from mla_attention.configs import deepseek_v3, deepseek_v32, from_hf_config, glm5
from mla_attention.rotary import build_rotary, softmax_scale

transformers = pytest.importorskip("transformers", minversion="5.24")

from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3  # noqa: E402
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32  # noqa: E402
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm  # noqa: E402

FAMILIES = {
    "deepseek_v2": (transformers.DeepseekV2Config, v2.DeepseekV2RotaryEmbedding, v2.DeepseekV2Attention),
    "deepseek_v3": (transformers.DeepseekV3Config, v3.DeepseekV3RotaryEmbedding, v3.DeepseekV3Attention),
    "deepseek_v32": (transformers.DeepseekV32Config, v32.DeepseekV32RotaryEmbedding, v32.DeepseekV32Attention),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, glm.GlmMoeDsaRotaryEmbedding, glm.GlmMoeDsaAttention),
}
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 64,
    "v_head_dim": 20,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_topk": 8,
    "max_position_embeddings": 163840,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
ROPE = {
    "plain": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "flat theta": {"rope_theta": 8e6},
    "two thetas": {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "old spelling": {
        "rope_theta": 1e4,
        "rope_scaling": {**YARN, "type": "yarn", "mscale": 0.707, "mscale_all_dim": 1.0},
    },
    "no mscale": {"rope_parameters": {**YARN, "rope_theta": 5e4, "beta_fast": 1.0, "beta_slow": 1.0}},
    "mscale alone": {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.707}},
    "mscale_all_dim alone": {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale_all_dim": 0.707}},
    "zero mscale_all_dim": {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.0}},
    "attention factor": {
        "rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 1.25, "mscale_all_dim": 1.0}
    },
    "not truncated": {"rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False}},
    "no original length": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
}


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:rope_theta is")
def test_tables_and_softmax_scale(family: str, rope: str) -> None:
    build, rotary, attention = FAMILIES[family]
    theirs = build(**SMALL, **ROPE[rope])
    config = from_hf_config(theirs, layer_idx=0)

    table = rotary(theirs)
    ours = build_rotary(config)
    torch.testing.assert_close(ours.inv_freq.float(), table.inv_freq, rtol=2e-6, atol=0)
    assert ours.amplitude == pytest.approx(table.attention_scaling, rel=1e-12)
    assert softmax_scale(config) == pytest.approx(attention(theirs, 0).scaling, rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_object_equals_its_dict(family: str) -> None:
    build, _, _ = FAMILIES[family]
    theirs = build(**SMALL, **ROPE["yarn"])
    config = from_hf_config(theirs)
    assert from_hf_config(theirs.to_dict()) == config
    assert (config.hidden_size, config.num_attention_heads, config.num_layers) == (64, 4, 8)
    assert (config.q_lora_rank, config.kv_lora_rank) == (48, 32)
    assert (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim) == (24, 64, 20)
    assert config.layernorm_epsilon == 1e-6
    if family in ("deepseek_v32", "glm_moe_dsa"):
        assert (config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.dsa_indexer_topk) == (2, 64, 8)


def test_no_query_compression() -> None:
    theirs = transformers.DeepseekV2Config(**{**SMALL, "q_lora_rank": None}, **ROPE["plain"])
    assert from_hf_config(theirs).q_lora_rank is None


def test_transformers_defaults_are_the_presets_dims() -> None:
    """The classes' defaults are the published sizes, except for rope."""
    for build, preset in (
        (transformers.DeepseekV3Config, deepseek_v3),
        (transformers.DeepseekV32Config, deepseek_v32),
        (transformers.GlmMoeDsaConfig, glm5),
    ):
        assert from_hf_config(build(), rotary_base=1e6) == preset(rope_type="rope", rotary_base=1e6)


@pytest.mark.parametrize("schedule", [{}, {"index_topk_freq": 4}, {"index_topk_freq": 3, "index_skip_topk_offset": 4}])
@pytest.mark.parametrize("as_dict", [True, False])
def test_shared_indexers(schedule: dict, as_dict: bool) -> None:
    theirs = transformers.GlmMoeDsaConfig(**SMALL, **ROPE["plain"], **schedule)
    source = {**theirs.to_dict(), "indexer_types": None, **schedule} if as_dict else theirs
    for layer_idx, kind in enumerate(theirs.indexer_types):
        assert from_hf_config(source, layer_idx=layer_idx).dsa_indexer_shared is (kind == "shared")


def test_kimi_k25() -> None:
    text = {**SMALL, "model_type": "kimi_k2", **ROPE["yarn"]}
    theirs = transformers.Kimi_K25Config(text_config=text)
    config = from_hf_config(theirs)
    assert config == from_hf_config({"model_type": "kimi_k25", "text_config": text})
    assert config == from_hf_config(transformers.DeepseekV3Config(**SMALL, **ROPE["yarn"]))
    assert config.rotary_scaling_factor == 40.0


def test_glm_5_2_frequencies() -> None:
    """Base 8e6, nested or flat: the second frequency is 8e6^(-2/64)."""
    for rope in ({"rope_theta": 8e6}, {"rope_parameters": {"rope_theta": 8e6}}):
        config = from_hf_config({**SMALL, "model_type": "glm_moe_dsa", **rope})
        assert build_rotary(config).inv_freq[1].item() == pytest.approx(math.pow(8e6, -2 / 64), rel=1e-12)
