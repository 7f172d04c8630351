import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest

from mla_attention.configs import ConfigError, MLAConfig, glm5, tiny

# The public interface: names, order and defaults are fixed.
DEFAULTS = {
    "num_layers": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "yarn",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "rope_truncate": True,
    "rope_attention_factor": None,
    "softmax_scale": None,
    "apply_rope_fusion": False,
    "rotary_interleaved": False,
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "core_attention_backend": "auto",
    "cp_comm_type": None,
    "kv_assembly": "auto",
    "recompute_up_proj": False,
    "mla_down_proj_fusion": False,
    "qk_clip": False,
    "qk_clip_threshold": 100.0,
    "qk_clip_alpha": 0.5,
    "init_method_std": 0.02,
    "calculate_per_token_loss": False,
    "experimental_attention_variant": None,
    "dsa_indexer_n_heads": None,
    "dsa_indexer_head_dim": None,
    "dsa_indexer_topk": None,
    "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_k_norm_epsilon": 1e-6,
    "dsa_indexer_loss_coeff": 0.0,
    "dsa_indexer_use_sparse_loss": False,
    "dsa_indexer_shared": False,
    "dsa_mode": "sparse",
    "dsa_score_budget_bytes": 2**30,
}


def test_fields_and_defaults() -> None:
    config = MLAConfig(hidden_size=256, num_attention_heads=2)
    values = dataclasses.asdict(config)
    assert list(values) == ["hidden_size", "num_attention_heads", *DEFAULTS]
    assert values == {"hidden_size": 256, "num_attention_heads": 2, **DEFAULTS}


def test_signature_is_the_fields() -> None:
    parameters = list(inspect.signature(MLAConfig).parameters.values())
    assert [parameter.name for parameter in parameters] == ["hidden_size", "num_attention_heads", *DEFAULTS]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        MLAConfig(256, 2)  # type: ignore[misc]


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny().hidden_size = 3  # type: ignore[misc]


def test_equality_and_hash_are_by_value() -> None:
    assert tiny() == tiny()
    assert hash(tiny()) == hash(tiny())
    assert tiny() != tiny(v_head_dim=24)
    assert {tiny(): "a"}[tiny()] == "a"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config)), dataclasses.replace]
)
def test_copies_are_equal(copied) -> None:
    assert copied(glm5()) == glm5()


def test_replace_changes_and_validates() -> None:
    assert dataclasses.replace(tiny(), v_head_dim=28).v_head_dim == 28
    with pytest.raises(ConfigError, match="v_head_dim must be a positive int, got -1"):
        dataclasses.replace(tiny(), v_head_dim=-1)
    with pytest.raises(ConfigError, match=r"'v_head_dims'.*'v_head_dim'"):
        dataclasses.replace(tiny(), v_head_dims=28)


def test_unknown_keyword_comes_before_missing_and_wrong_ones() -> None:
    with pytest.raises(ConfigError, match=r"'hiden_size'.*'hidden_size'"):
        MLAConfig(hiden_size=256, v_head_dim=-1)  # type: ignore[call-arg]


def test_missing_keywords_are_named_together() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size and num_attention_heads must be given"):
        MLAConfig()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^num_attention_heads must be given"):
        MLAConfig(hidden_size=4)  # type: ignore[call-arg]


def test_package_needs_the_standard_library_only() -> None:
    probe = (
        "import sys, types, pathlib, mla_attention.configs as configs\n"
        "print([name for name in ('torch', 'numpy', 'triton', 'einops', 'transformers') if name in sys.modules])"
    )
    # The parent package is replaced by an empty one with the same search path, so only configs' own imports count.
    probe = (
        "import importlib.util, sys, types\n"
        "spec = importlib.util.find_spec('mla_attention')\n"
        "parent = types.ModuleType('mla_attention')\n"
        "parent.__path__ = spec.submodule_search_locations\n"
        "sys.modules['mla_attention'] = parent\n" + probe
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
