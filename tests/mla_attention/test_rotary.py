"""Tables and scales against fp64 formulas written out here, and the numbers that published models are known by."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from mla_attention import MLASelfAttention, RotaryEmbedding, YarnRotaryEmbedding
from mla_attention.configs import deepseek_v2, deepseek_v2_lite, deepseek_v3, glm5, kimi_k2, tiny
from mla_attention.rotary import _MOST_TABLES, _TABLES, build_rotary, softmax_scale, yarn_correction_range

V3 = dict(dim=64, base=1e4, factor=40.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0)
POSITIONS = [0, 1, 255, 257, 4097, 15962, 131071]


def test_correction_ranges_of_published_models():
    assert yarn_correction_range(32, 1, 64, 1e4, 4096) == (10, 23)
    assert yarn_correction_range(1, 1, 64, 5e4, 4096) == (19, 20)


def test_yarn_frequency_inside_the_ramp_depends_on_truncation():
    truncated = YarnRotaryEmbedding(**V3, mscale=1.0, mscale_all_dim=1.0).inv_freq
    exact = YarnRotaryEmbedding(**V3, mscale=1.0, mscale_all_dim=1.0, truncate=False).inv_freq
    assert truncated.dtype == torch.float64
    assert truncated[16].item() == pytest.approx(0.0055, abs=1e-9)
    assert exact[16].item() == pytest.approx(0.00552406, abs=1e-8)
    assert truncated[0].item() == 1.0
    assert truncated[31].item() == pytest.approx(1e4 ** (-62 / 64) / 40, rel=1e-14)


def test_a_ramp_of_no_width_stays_finite():
    rotary = YarnRotaryEmbedding(64, 5e4, 32.0, 4096, 1.0, 1.0, 1.0, 1.0, truncate=False)
    assert torch.isfinite(rotary.inv_freq).all()
    assert torch.isfinite(rotary.cos_sin(64, device="cpu")[0]).all()


@pytest.mark.parametrize(("base", "second"), [(1e6, 1e6 ** (-2 / 64)), (8e6, 8e6 ** (-2 / 64))])
def test_plain_frequencies(base, second):
    assert RotaryEmbedding(64, base).inv_freq[1].item() == pytest.approx(second, rel=1e-15)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (deepseek_v2_lite(), 0.114721),
        (deepseek_v2(), 0.114721),
        (deepseek_v3(), 0.135234),
        (kimi_k2(), 0.130861),
        (kimi_k2(rotary_scaling_factor=64.0), 0.144680),
        (glm5(), 0.0625),
        (deepseek_v3(rope_type="rope"), 192**-0.5),
        (deepseek_v3(softmax_scale=0.5), 0.5),
    ],
)
def test_softmax_scales(config, scale):
    assert softmax_scale(config) == pytest.approx(scale, abs=5e-7)


@pytest.mark.parametrize("config", [deepseek_v2(), deepseek_v3(), kimi_k2()])
def test_tables_of_models_with_equal_mscales_are_unit(config):
    cos, sin = build_rotary(config).cos_sin(128, device="cpu")
    torch.testing.assert_close(cos.double() ** 2 + sin.double() ** 2, torch.ones_like(cos).double(), atol=3e-7, rtol=0)


def test_tables_carry_the_ratio_of_the_mscales():
    cos, sin = YarnRotaryEmbedding(**V3, mscale=1.0, mscale_all_dim=0.0).cos_sin(16, device="cpu")
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.368888**2), atol=1e-5, rtol=0)
    cos, sin = YarnRotaryEmbedding(**V3, attention_factor=1.5).cos_sin(16, device="cpu")
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 2.25), atol=1e-5, rtol=0)


def cast_bf16(layer):
    return layer.bfloat16()


def cast_half(layer):
    return layer.half()


def from_meta(layer):
    return MLASelfAttention(layer.config, device="meta").to_empty(device="cpu")


def copied(layer):
    return pickle.loads(pickle.dumps(copy.deepcopy(layer)))


@pytest.mark.parametrize("cast", [cast_bf16, cast_half, from_meta, copied])
def test_tables_are_fp32_and_exact_whatever_happens_to_the_module(cast):
    config = tiny(qk_pos_emb_head_dim=64, rope_type="rope", rotary_base=1e6)
    layer = cast(MLASelfAttention(config))
    cos, sin = layer.rotary.cos_sin(131072, device="cpu")
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == (131072, 1, 1, 64)
    for p in POSITIONS:
        for i in range(64):
            angle = p * 1e6 ** (-2 * (i % 32) / 64)
            assert abs(cos[p, 0, 0, i].item() - math.cos(angle)) < 1e-7
            assert abs(sin[p, 0, 0, i].item() - math.sin(angle)) < 1e-7


def test_no_table_is_a_buffer_or_in_the_state_dict():
    layer = MLASelfAttention(tiny())
    assert not list(layer.buffers())
    assert not any("rotary" in key or "cos" in key for key in layer.state_dict())
    assert not any(isinstance(m, nn.Embedding) for m in layer.modules())


def test_zigzag_cut_holds_the_rank_s_two_chunks_and_is_no_prefix():
    rotary = RotaryEmbedding(8, 1e4)
    full = rotary.cos_sin(16, device="cpu")[0]
    rank1 = rotary.cos_sin(16, device="cpu", cp_rank=1, cp_size=2)[0]
    assert torch.equal(rank1, full[[4, 5, 6, 7, 8, 9, 10, 11]])
    longer = rotary.cos_sin(32, device="cpu", cp_rank=1, cp_size=2)[0]
    assert not torch.equal(longer[:8], rank1)
    assert torch.equal(rotary.cos_sin(16, device="cpu", cp_rank=1, cp_size=2, packed=True)[0], full)


def test_layers_share_one_table_which_grows_and_the_cache_is_bounded():
    first, second = RotaryEmbedding(10, 777.0), RotaryEmbedding(10, 777.0)
    assert first.cos_sin(8, device="cpu")[0].data_ptr() == second.cos_sin(8, device="cpu")[0].data_ptr()
    assert first.cos_sin(5000, device="cpu")[0].shape[0] == 5000
    for base in range(2, 2 + 2 * _MOST_TABLES):
        RotaryEmbedding(2, float(base)).cos_sin(1, device="cpu")
    assert len(_TABLES) <= _MOST_TABLES


def test_a_table_made_in_inference_mode_serves_training_later():
    rotary = RotaryEmbedding(6, 321.0)
    with torch.inference_mode():
        rotary.cos_sin(4, device="cpu")
    assert not rotary.cos_sin(4, device="cpu")[0].is_inference()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RotaryEmbedding(7, 1e4), "dim: given 7"),
        (lambda: RotaryEmbedding(8, 0.0), "base: given 0.0"),
        (lambda: RotaryEmbedding(8, 1e4).cos_sin(10, device="cpu", cp_size=2), "length: given 10.*multiples of.*4"),
        (lambda: RotaryEmbedding(8, 1e4).cos_sin(8, device="cpu", cp_rank=2, cp_size=2), "cp_rank: given 2"),
        (lambda: YarnRotaryEmbedding(64, 1e4, 0.5, 4096), "factor: given 0.5"),
        (lambda: YarnRotaryEmbedding(64, 1e4, 2.0, 0), "original_max_position_embeddings: given 0"),
        (lambda: YarnRotaryEmbedding(64, 1e4, 2.0, 4096, 1.0, 2.0), "beta_fast, beta_slow: given 1.0, 2.0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
