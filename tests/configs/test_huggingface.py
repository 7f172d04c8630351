import dataclasses
import math
import warnings

import pytest

from mla_attention.configs import (
    ConfigError,
    MLAConfig,
    deepseek_v2,
    deepseek_v2_lite,
    deepseek_v3,
    deepseek_v32,
    from_hf_config,
    glm5,
    kimi_k2,
)

HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V2_LITE = {
    "model_type": "deepseek_v2",
    **HEADS,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "attention_bias": False,
    "max_position_embeddings": 163840,
}
V2 = {**V2_LITE, "hidden_size": 5120, "num_attention_heads": 128, "num_hidden_layers": 60, "q_lora_rank": 1536}
V3 = {
    "model_type": "deepseek_v3",
    **HEADS,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "attention_bias": False,
    "max_position_embeddings": 163840,
}
V32 = {**V3, "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
K2 = {
    **V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "rope_theta": 50000.0,
    "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}
GLM5 = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_hidden_layers": 78,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}


def refusal(config: object, **arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        from_hf_config(config, **arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("source", "preset"),
    [
        (V2_LITE, deepseek_v2_lite),
        (V2, deepseek_v2),
        (V3, deepseek_v3),
        (V32, deepseek_v32),
        (K2, kimi_k2),
        (GLM5, glm5),
    ],
)
def test_published_configs_are_the_presets(source: dict, preset) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_hf_config(source) == preset()


def test_reading_changes_nothing() -> None:
    source = {**V3, "rope_scaling": dict(YARN)}
    from_hf_config(source)
    assert source == {**V3, "rope_scaling": YARN}


# -- rope: where the numbers stand


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 8e6, "rope_parameters": None},
        {"rope_theta": 8e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 8e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 8e6}},
        {"rope_theta": 8000000, "rope_parameters": {"rope_theta": 8e6}},
        {"rope_parameters": None, "rope_scaling": {"type": "default", "rope_theta": 8e6}},
    ],
)
def test_theta_nested_or_flat(rope: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = from_hf_config({**GLM5, **rope})
    assert config.rotary_base == 8e6
    assert config.rope_type == "rope"


def test_nested_theta_wins_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"8000000\.0.*10000") as caught:
        config = from_hf_config({**GLM5, "rope_theta": 10000, "rope_parameters": {"rope_theta": 8e6}})
    assert config.rotary_base == 8e6
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {}}, {"rope_scaling": YARN}])
def test_theta_is_never_made_up(rope: dict) -> None:
    source = {key: value for key, value in V3.items() if key not in ("rope_theta", "rope_scaling")}
    assert refusal({**source, **rope}).startswith("rope_theta must be given")


def test_rope_parameters_equals_rope_scaling() -> None:
    source = {key: value for key, value in V3.items() if key not in ("rope_theta", "rope_scaling")}
    modern = {**YARN, "rope_type": "yarn", "rope_theta": 10000}
    del modern["type"]
    assert from_hf_config({**source, "rope_parameters": modern}) == deepseek_v3()
    assert from_hf_config({**source, "rope_parameters": modern, "rope_scaling": YARN}) == deepseek_v3()


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "longrope", "llama3", "rope", 3])
def test_unknown_rope_type(rope_type: object) -> None:
    message = refusal({**V3, "rope_scaling": {**YARN, "type": rope_type}})
    assert message == f"rope_type must be 'default' or 'yarn', got {rope_type!r}"


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"rope_scaling": {**YARN, "rope_type": "default"}}, ["rope_type 'default'", "type 'yarn'"]),
        ({"rope_parameters": {"factor": 64}}, ["rope_parameters factor 64", "rope_scaling factor 40"]),
        (
            {"original_max_position_embeddings": 8192},
            ["original_max_position_embeddings 8192", "nested original_max_position_embeddings 4096"],
        ),
        ({"qk_head_dim": 128}, ["qk_head_dim 128", "qk_nope_head_dim 128 + qk_rope_head_dim 64"]),
    ],
)
def test_contradictions_name_both(changes: dict, both: list[str]) -> None:
    message = refusal({**V3, **changes})
    for part in both:
        assert part in message
    assert "contradict each other" in message


def test_leftover_yarn_numbers_are_refused() -> None:
    message = refusal({**V3, "rope_scaling": {**YARN, "type": "default"}})
    assert message == "factor must be absent with rope_type 'default' (yarn reads it), got 40"
    message = refusal({**GLM5, "rope_parameters": {"rope_theta": 1e6, "mscale_all_dim": 1.0}})
    assert message.startswith("mscale_all_dim must be absent")


def test_partial_rotation_is_refused() -> None:
    assert refusal({**V3, "partial_rotary_factor": 0.5}).startswith("rotary_percent must be 1.0")
    assert refusal({**V3, "rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}).startswith("rotary_percent")
    assert from_hf_config({**V3, "partial_rotary_factor": 1.0}) == deepseek_v3()


def test_rope_settings_must_be_a_dict() -> None:
    assert refusal({**V3, "rope_scaling": 40}) == "rope_scaling must be a dict or null, got 40"


# -- rope: what the numbers mean


def yarn_config(**changes: object) -> MLAConfig:
    rope = {key: value for key, value in {**YARN, **changes}.items() if value != "absent"}
    return from_hf_config({**V3, "rope_scaling": rope})


def table_factor(config: MLAConfig) -> float:
    def concentration(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.rotary_scaling_factor) + 1.0

    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    return concentration(config.mscale) / concentration(config.mscale_all_dim)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "factor"),
    [
        (1.0, 1.0, 1.0),
        (0.707, 0.707, 1.0),
        (1.0, 0.5, 1.3688879 / 1.1844440),
        # not both given (0 counts as not given): 0.1*ln(40) + 1
        ("absent", "absent", 1.3688879),
        (0.707, "absent", 1.3688879),
        ("absent", 1.0, 1.3688879),
        (0.707, 0, 1.3688879),
        (0, 1.0, 1.3688879),
        (None, None, 1.3688879),
    ],
)
def test_table_factor(mscale: object, mscale_all_dim: object, factor: float) -> None:
    config = yarn_config(mscale=mscale, mscale_all_dim=mscale_all_dim)
    assert table_factor(config) == pytest.approx(factor, rel=1e-6)
    given = mscale_all_dim if isinstance(mscale_all_dim, int | float) else 0.0
    assert config.mscale_all_dim == given  # the softmax scale needs it, whatever the tables are multiplied by


def test_attention_factor_wins() -> None:
    config = yarn_config(attention_factor=1.25)
    assert config.rope_attention_factor == 1.25
    assert config.mscale_all_dim == 1.0


def test_truncate() -> None:
    assert yarn_config(truncate=False).rope_truncate is False
    assert yarn_config().rope_truncate is True


def test_missing_betas_are_32_and_1() -> None:
    for missing in ("absent", None, 0):
        config = yarn_config(beta_fast=missing, beta_slow=missing)
        assert (config.beta_fast, config.beta_slow) == (32.0, 1.0)


def test_original_length() -> None:
    assert yarn_config(original_max_position_embeddings="absent").original_max_position_embeddings == 163840
    flat = {**V3, "original_max_position_embeddings": 4096}
    flat["rope_scaling"] = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    assert from_hf_config(flat) == deepseek_v3()
    del flat["original_max_position_embeddings"], flat["max_position_embeddings"]
    assert refusal(flat).startswith("original_max_position_embeddings must be given")


def test_factor_follows_from_the_lengths() -> None:
    assert yarn_config(factor=None).rotary_scaling_factor == 40.0
    source = {**V3, "rope_scaling": {**YARN, "factor": None}}
    for longest in (None, "163840", 0):
        assert refusal({**source, "max_position_embeddings": longest}).startswith("factor must be given")


@pytest.mark.parametrize("factor", [0.5, "40", True])
def test_bad_factor(factor: object) -> None:
    message = refusal({**V3, "rope_scaling": {**YARN, "factor": factor, "mscale": "absent"}})
    assert message.startswith("rotary_scaling_factor must be a finite number >= 1")


# -- keys that are not the layer's


@pytest.mark.parametrize("first", [True, False])
def test_head_dim_never_changes_the_rope_width(first: bool) -> None:
    trap = {"head_dim": 192}
    source = {key: value for key, value in GLM5.items() if key != "head_dim"}
    source = {**trap, **source} if first else {**source, **trap}
    assert from_hf_config(source).qk_pos_emb_head_dim == 64
    assert from_hf_config(source) == glm5()


def test_other_norms_epsilon_is_not_the_latents() -> None:
    assert from_hf_config({**GLM5, "rms_norm_eps": 0.1}).layernorm_epsilon == 1e-6


def test_key_value_heads_are_not_read() -> None:
    assert from_hf_config({**V3, "num_key_value_heads": 8}) == deepseek_v3()


def test_initial_std_and_dropout_are_read() -> None:
    config = from_hf_config({**V3, "initializer_range": 0.006, "attention_dropout": 0.25})
    assert (config.init_method_std, config.attention_dropout) == (0.006, 0.25)


@pytest.mark.parametrize(
    "missing",
    ["hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"],
)
def test_dims_have_to_be_there(missing: str) -> None:
    source = {key: value for key, value in V3.items() if key != missing}
    assert refusal(source) == f"{missing} must be in the Hugging Face config (a positive int), got nothing"


@pytest.mark.parametrize("missing", ["index_n_heads", "index_head_dim", "index_topk"])
def test_indexer_dims_have_to_be_there(missing: str) -> None:
    source = {key: value for key, value in GLM5.items() if key != missing}
    assert refusal(source).startswith(f"{missing} must be in the Hugging Face config")
    assert from_hf_config(source, experimental_attention_variant=None) == glm5(experimental_attention_variant=None)


def test_partial_dict() -> None:
    config = from_hf_config({**HEADS, "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 5e5})
    expected = MLAConfig(hidden_size=64, num_attention_heads=2, rope_type="rope", rotary_base=5e5)
    assert config == expected


@pytest.mark.parametrize("value", [192.5, True, "128", -1])
def test_bad_dims_are_refused(value: object) -> None:
    source = {**V3, "qk_nope_head_dim": value}
    assert refusal(source).startswith("qk_head_dim must be a positive int, got")


@pytest.mark.parametrize("value", [True, 1])
def test_attention_bias(value: object) -> None:
    assert refusal({**V3, "attention_bias": value}) == (
        f"attention_bias must be False (only some projections would carry a bias), got {value!r}"
    )


@pytest.mark.parametrize("value", [False, None])
def test_rope_interleave(value: object) -> None:
    assert refusal({**V3, "rope_interleave": value}).startswith("rope_interleave must be True")
    assert from_hf_config({**V3, "rope_interleave": True}) == deepseek_v3()


# -- model families


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v4", "glm5_next", 3])
def test_unknown_model(model_type: object) -> None:
    message = refusal({**V3, "model_type": model_type})
    assert message == (
        f"model_type must be one of deepseek_v2, deepseek_v3, kimi_k2, deepseek_v32, glm_moe_dsa, got {model_type!r}"
    )


def test_an_indexer_of_unknown_family_is_ambiguous() -> None:
    source = {key: value for key, value in V32.items() if key != "model_type"}
    assert refusal(source).startswith("model_type must be one of")


@pytest.mark.parametrize("config", [None, 3, "config.json", [V3]])
def test_not_a_config(config: object) -> None:
    assert refusal(config).startswith("config must be a dict or a transformers config, got ")


def test_nested_text_config() -> None:
    wrapper = {"model_type": "kimi_k25", "hidden_size": 5, "vision_config": {"hidden_size": 1152}}
    source = {**K2, "rope_scaling": {**K2["rope_scaling"], "factor": 64.0}}  # type: ignore[dict-item]
    expected = kimi_k2(rotary_scaling_factor=64.0)
    assert from_hf_config({**wrapper, "text_config": source}) == expected
    del source["model_type"]
    assert from_hf_config({**wrapper, "text_config": source}) == expected
    assert refusal(wrapper).startswith("text_config must be given for model_type 'kimi_k25'")


def test_indexer_pairing_is_the_familys_own() -> None:
    assert from_hf_config({**V32, "rope_interleave": True}).dsa_indexer_rope_interleaved is False
    assert from_hf_config({**GLM5, "rope_interleave": True}).dsa_indexer_rope_interleaved is True
    assert from_hf_config({**V32, "indexer_rope_interleave": True}).dsa_indexer_rope_interleaved is True


# -- shared indexers


@pytest.mark.parametrize("layer_idx", range(12))
def test_schedule_of_shared_indexers(layer_idx: int) -> None:
    full = {0, 1, 5, 9}  # every fourth layer, the first one being layer 1
    config = from_hf_config({**GLM5, "index_topk_freq": 4}, layer_idx=layer_idx)
    assert config.dsa_indexer_shared is (layer_idx not in full)


def test_offset_of_the_schedule() -> None:
    source = {**GLM5, "index_topk_freq": 3, "index_skip_topk_offset": 4}
    shared = [from_hf_config(source, layer_idx=index).dsa_indexer_shared for index in range(8)]
    assert shared == [False, False, False, False, True, True, False, True]


def test_list_of_types_goes_before_pattern_and_schedule() -> None:
    types = ["full", "shared", "full"]
    source = {**GLM5, "num_hidden_layers": 3, "index_topk_freq": 4}
    listed = [from_hf_config({**source, "indexer_types": types}, layer_idx=index) for index in range(3)]
    assert [config.dsa_indexer_shared for config in listed] == [False, True, False]
    patterned = {**source, "index_topk_pattern": "FSS"}
    assert from_hf_config(patterned, layer_idx=2).dsa_indexer_shared
    assert not from_hf_config({**patterned, "indexer_types": types}, layer_idx=2).dsa_indexer_shared


def test_without_schedule_or_layer_the_indexer_is_its_own() -> None:
    assert not from_hf_config(GLM5, layer_idx=7).dsa_indexer_shared
    assert not from_hf_config({**GLM5, "index_topk_freq": 4}).dsa_indexer_shared
    assert from_hf_config(V3, layer_idx=7) == deepseek_v3()
    dense = from_hf_config({**GLM5, "index_topk_freq": 4}, layer_idx=3, experimental_attention_variant=None)
    assert dense == glm5(experimental_attention_variant=None)


@pytest.mark.parametrize(
    ("changes", "layer_idx", "message"),
    [
        ({}, 78, "layer_idx must be below num_hidden_layers (78), got 78"),
        ({}, -1, "layer_idx must be None or an int >= 0, got -1"),
        ({}, True, "layer_idx must be None or an int >= 0, got True"),
        ({}, 1.0, "layer_idx must be None or an int >= 0, got 1.0"),
        ({"indexer_types": ["full"]}, 1, "layer_idx must be below the length of indexer_types (1), got 1"),
        ({"indexer_types": ["half"]}, 0, "indexer_types[0] must be 'full' or 'shared', got 'half'"),
        ({"index_topk_freq": "4"}, 3, "index_topk_freq must be an int >= 0, got '4'"),
        ({"index_skip_topk_offset": -1}, 3, "index_skip_topk_offset must be an int >= 0, got -1"),
    ],
)
def test_bad_layer(changes: dict, layer_idx: object, message: str) -> None:
    assert refusal({**GLM5, **changes}, layer_idx=layer_idx) == message


# -- overrides


def test_overrides_win() -> None:
    config = from_hf_config(V32, apply_rope_fusion=True, dsa_indexer_topk=64)
    assert config == dataclasses.replace(deepseek_v32(), apply_rope_fusion=True, dsa_indexer_topk=64)
    assert from_hf_config(V32, experimental_attention_variant=None) == deepseek_v3()
    assert from_hf_config(V3, rope_type="rope") == deepseek_v3(rope_type="rope")


def test_an_override_supplies_a_missing_dim() -> None:
    source = {key: value for key, value in V3.items() if key != "v_head_dim"}
    assert from_hf_config(source, v_head_dim=128) == deepseek_v3()


def test_unknown_override_comes_first() -> None:
    message = refusal({}, kv_lora_rnak=3)
    assert message.startswith("from_hf_config has no field 'kv_lora_rnak'")
    assert message.endswith("'kv_lora_rank'")
