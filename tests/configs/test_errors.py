import pytest

from mla_attention.configs import ConfigError
from mla_attention.configs.errors import refuse_unknown_fields


def test_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("given", "closest"),
    [
        ("kv_lora_rnak", "kv_lora_rank"),
        ("hiddensize", "hidden_size"),
        # Hugging Face's names: nearest by meaning, not by spelling
        ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
        ("qk_nope_head_dim", "qk_head_dim"),
        ("rope_theta", "rotary_base"),
    ],
)
def test_unknown_field_names_the_closest_one(given: str, closest: str) -> None:
    known = ["hidden_size", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "rotary_base"]
    with pytest.raises(ConfigError) as refusal:
        refuse_unknown_fields("Owner", {"hidden_size": 1, given: 77}, known)
    message = str(refusal.value)
    assert message.startswith("Owner has no field")
    assert repr(given) in message
    assert "77" in message
    assert message.endswith(repr(closest))
    assert "\n" not in message


def test_known_fields_pass() -> None:
    refuse_unknown_fields("Owner", {"hidden_size": 1}, ["hidden_size"])
