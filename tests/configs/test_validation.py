import dataclasses
import math

import pytest

from mla_attention.configs import ConfigError, MLAConfig, glm5, tiny
from mla_attention.configs.validation import (
    _FIELD_RULES,
    CORE_ATTENTION_BACKENDS,
    CP_COMM_TYPES,
    DSA_FIELDS,
    YARN_FIELDS,
    validate,
)

DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 8,
}

POSITIVE_INTS = [
    "hidden_size",
    "num_attention_heads",
    "num_layers",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "original_max_position_embeddings",
]
DSA_POSITIVE_INTS = ["dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_score_budget_bytes"]
POSITIVE_REALS = [
    "beta_fast",
    "beta_slow",
    "rope_attention_factor",
    "softmax_scale",
    "layernorm_epsilon",
    "qk_clip_threshold",
]
NON_NEGATIVE_REALS = ["mscale", "mscale_all_dim", "init_method_std"]
FLAGS = [
    "rope_truncate",
    "apply_rope_fusion",
    "add_bias_linear",
    "recompute_up_proj",
    "mla_down_proj_fusion",
    "qk_clip",
    "calculate_per_token_loss",
]
DSA_FLAGS = [
    "dsa_indexer_rope_interleaved",
    "dsa_indexer_rotate_activation",
    "dsa_indexer_scoring_relu",
    "dsa_indexer_use_sparse_loss",
    "dsa_indexer_shared",
]


def refusal(**fields: object) -> str:
    """The one line with which `tiny` refuses these fields."""
    with pytest.raises(ConfigError) as caught:
        tiny(**fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_field_has_a_rule() -> None:
    assert set(_FIELD_RULES) == {field.name for field in dataclasses.fields(MLAConfig)}


@pytest.mark.parametrize("value", [0, -1, 192.5, 64.0, True, "64", math.nan])
@pytest.mark.parametrize("name", POSITIVE_INTS)
def test_dims_are_positive_ints(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be ")
    assert "positive" in message
    assert message.endswith(f"got {value!r}")


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
@pytest.mark.parametrize("name", DSA_POSITIVE_INTS)
def test_indexer_dims_are_positive_ints(name: str, value: object) -> None:
    message = refusal(**{**DSA, name: value})
    assert message.startswith(f"{name} must be ")
    assert message.endswith(f"positive int, got {value!r}")


@pytest.mark.parametrize("name", [name for name in POSITIVE_INTS if name != "q_lora_rank"])
def test_only_the_query_rank_may_be_none(name: str) -> None:
    assert refusal(**{name: None}).endswith("got None")
    assert tiny(q_lora_rank=None).q_lora_rank is None


def test_rotary_width_is_even() -> None:
    assert refusal(qk_pos_emb_head_dim=15) == "qk_pos_emb_head_dim must be a positive even int, got 15"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, True, "1"])
@pytest.mark.parametrize("name", POSITIVE_REALS)
def test_positive_numbers(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be ")
    assert message.endswith(f"a finite number > 0, got {value!r}")


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf, True, None])
@pytest.mark.parametrize("name", NON_NEGATIVE_REALS)
def test_non_negative_numbers(name: str, value: object) -> None:
    assert refusal(**{name: value}) == f"{name} must be a finite number >= 0, got {value!r}"


def test_integers_too_large_for_a_float_are_judged_too() -> None:
    assert tiny(qk_clip_threshold=10**400).qk_clip_threshold == 10**400
    assert refusal(mscale=-(10**400)).startswith("mscale must be a finite number >= 0")


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name: str, value: object) -> None:
    assert refusal(**{name: value}) == f"{name} must be True or False, got {value!r}"


@pytest.mark.parametrize("name", DSA_FLAGS)
def test_indexer_flags_are_bools(name: str) -> None:
    assert refusal(**DSA, **{name: 1}) == f"{name} must be True or False, got 1"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rope_type", "linear", "'rope', 'yarn'"),
        ("rope_type", None, "'rope', 'yarn'"),
        ("rope_type", ["yarn"], "'rope', 'yarn'"),
        ("core_attention_backend", "flash", "'auto', 'sdpa', 'varlen', 'te', 'flex', 'reference'"),
        ("cp_comm_type", "ring", "None, 'p2p', 'all_gather', 'a2a'"),
        ("cp_comm_type", "a2a+p2p", "None, 'p2p', 'all_gather', 'a2a'"),
        ("cp_comm_type", ["p2p"], "None, 'p2p', 'all_gather', 'a2a'"),
        ("kv_assembly", "fast", "'auto', 'split', 'gemm'"),
        ("experimental_attention_variant", "gdn", "None, 'dsa'"),
        ("dsa_mode", "warmup", "'sparse', 'dense_warmup'"),
    ],
)
def test_choices(name: str, value: object, allowed: str) -> None:
    assert refusal(**{name: value}) == f"{name} must be one of {allowed}, got {value!r}"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rotary_base", 1.0, "> 1"),
        ("rotary_base", 0.0, "> 1"),
        ("rotary_scaling_factor", 0.5, ">= 1"),
        ("rotary_percent", 0.5, "1.0"),
        ("rotary_percent", True, "1.0"),
        ("rotary_interleaved", True, "False"),
        ("rotary_interleaved", 0, "False"),
        ("attention_dropout", 1.0, "[0, 1)"),
        ("attention_dropout", -0.1, "[0, 1)"),
        ("qk_clip_alpha", 1.5, "[0, 1]"),
        ("qk_clip_alpha", -0.5, "[0, 1]"),
    ],
)
def test_ranges(name: str, value: object, allowed: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be ")
    assert allowed in message
    assert message.endswith(f"got {value!r}")


@pytest.mark.parametrize("given", CP_COMM_TYPES)
def test_an_exchange_of_keys_needs_transformer_engines_dense_attention(given: str) -> None:
    for backend in CORE_ATTENTION_BACKENDS:
        if backend == "te":
            assert tiny(cp_comm_type=given, core_attention_backend="te").cp_comm_type == given
            continue
        message = refusal(cp_comm_type=given, core_attention_backend=backend)
        assert message.startswith(f"core_attention_backend must be 'te' with cp_comm_type={given!r}")
        assert message.endswith(f"got {backend!r}")
    message = refusal(cp_comm_type=given, core_attention_backend="te", **DSA)
    assert message == f'cp_comm_type must be None with experimental_attention_variant="dsa", got {given!r}'
    message = refusal(cp_comm_type=given, core_attention_backend="te", qk_clip=True)
    assert message.startswith(f"qk_clip must be False with cp_comm_type={given!r}")


def test_beta_fast_is_not_below_beta_slow() -> None:
    assert refusal(beta_fast=1.0, beta_slow=2.0) == "beta_fast must be >= beta_slow (2.0), got 1.0"
    assert tiny(beta_fast=1.0, beta_slow=1.0).beta_fast == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_scaling_factor", 40.0),
        ("original_max_position_embeddings", 8192),
        ("beta_fast", 64.0),
        ("beta_slow", 2.0),
        ("mscale", 0.707),
        ("mscale_all_dim", 1.0),
        ("rope_truncate", False),
        ("rope_attention_factor", 1.5),
    ],
)
def test_yarn_fields_need_yarn(name: str, value: object) -> None:
    assert name in YARN_FIELDS
    message = refusal(rope_type="rope", **{name: value})
    assert message.startswith(f"{name} must stay at its default ")
    assert message.endswith(f'without rope_type="yarn", got {value!r}')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dsa_indexer_n_heads", 2),
        ("dsa_indexer_head_dim", 32),
        ("dsa_indexer_topk", 8),
        ("dsa_indexer_rope_interleaved", True),
        ("dsa_indexer_rotate_activation", True),
        ("dsa_indexer_scoring_relu", False),
        ("dsa_indexer_k_norm_epsilon", 1e-5),
        ("dsa_indexer_loss_coeff", 0.1),
        ("dsa_indexer_use_sparse_loss", True),
        ("dsa_indexer_shared", True),
        ("dsa_mode", "dense_warmup"),
        ("dsa_score_budget_bytes", 1024),
    ],
)
def test_dsa_fields_need_the_variant(name: str, value: object) -> None:
    assert name in DSA_FIELDS
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must stay at its default ")
    assert message.endswith(f'without experimental_attention_variant="dsa", got {value!r}')


@pytest.mark.parametrize("name", ["dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"])
def test_dsa_needs_all_three_indexer_dims(name: str) -> None:
    fields = {key: value for key, value in DSA.items() if key != name}
    message = refusal(**fields)
    assert message == f'{name} must be a positive int with experimental_attention_variant="dsa", got None'


def test_indexer_heads_hold_the_rotary_channels() -> None:
    message = refusal(**{**DSA, "dsa_indexer_head_dim": 14})
    assert message == "dsa_indexer_head_dim must be >= qk_pos_emb_head_dim (16), got 14"
    assert tiny(**{**DSA, "dsa_indexer_head_dim": 16}).dsa_indexer_head_dim == 16


def test_hadamard_needs_a_power_of_two() -> None:
    message = refusal(**{**DSA, "dsa_indexer_head_dim": 48}, dsa_indexer_rotate_activation=True)
    assert message == ("dsa_indexer_head_dim must be a power of two with dsa_indexer_rotate_activation=True, got 48")
    assert tiny(**{**DSA, "dsa_indexer_head_dim": 48}).dsa_indexer_head_dim == 48
    assert tiny(**DSA, dsa_indexer_rotate_activation=True).dsa_indexer_rotate_activation


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank must be a positive int with "),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0 with "),
        ({"qk_clip": True}, "qk_clip must be False with "),
    ],
)
def test_what_dsa_does_not_have(fields: dict[str, object], message: str) -> None:
    assert refusal(**DSA, **fields).startswith(message + 'experimental_attention_variant="dsa"')
    tiny(**fields)


@pytest.mark.parametrize("value", [-0.1, math.nan, True])
def test_loss_coefficient(value: object) -> None:
    assert refusal(**DSA, dsa_indexer_loss_coeff=value).startswith(
        "dsa_indexer_loss_coeff must be a finite number >= 0"
    )


@pytest.mark.parametrize("value", [0.0, -1e-6])
def test_indexer_norm_epsilon(value: float) -> None:
    assert refusal(**DSA, dsa_indexer_k_norm_epsilon=value).startswith("dsa_indexer_k_norm_epsilon must be a finite")


def test_down_projection_fusion_needs_two_projections() -> None:
    message = refusal(mla_down_proj_fusion=True, q_lora_rank=None)
    assert message.startswith("q_lora_rank must be a positive int with mla_down_proj_fusion=True")
    assert tiny(mla_down_proj_fusion=True).mla_down_proj_fusion


def test_warm_up_hands_over_by_one_change() -> None:
    warm = tiny(**DSA, dsa_mode="dense_warmup", dsa_indexer_loss_coeff=0.1, dsa_indexer_use_sparse_loss=True)
    assert dataclasses.replace(warm, dsa_mode="sparse").dsa_mode == "sparse"


def test_fusion_is_allowed_with_every_rope_and_variant() -> None:
    for config in (tiny(), tiny(rope_type="rope"), tiny(**DSA), glm5()):
        validate(dataclasses.replace(config, apply_rope_fusion=True))
