"""Arguments of another kind than documented, or of another layer: named in one line before anything is computed."""

import pytest
import torch

from mla_attention import LatentCache, MLASelfAttention, PackedSeqParams, RotaryEmbedding, YarnRotaryEmbedding
from mla_attention.configs import tiny

INDEXER = dict(experimental_attention_variant="dsa", dsa_indexer_n_heads=2, dsa_indexer_head_dim=16, dsa_indexer_topk=4)
CONFIGS = {"dense": tiny(), "dsa": tiny(**INDEXER)}
H = CONFIGS["dense"].hidden_size


def cache_of(config, dtype=torch.float32):
    return LatentCache(config, 2, 8, device="cpu", dtype=dtype)


@pytest.mark.parametrize("variant", CONFIGS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(hidden_states=[1.0]), "hidden_states: given list, allowed is a Tensor"),
        (dict(position_ids=[0, 1, 2, 3]), "position_ids: given list, allowed is a Tensor"),
        (dict(packed_seq_params=torch.tensor([0, 4])), "packed_seq_params: given Tensor, allowed is a PackedSeqParams"),
        (dict(cache=torch.zeros(8, 2, 48)), "cache: given Tensor, allowed is a LatentCache"),
        (dict(attention_mask=[True]), "attention_mask: given list, allowed is a Tensor"),
        (dict(position_ids=torch.tensor([0, 1, -1, 3])), "position_ids: given -1, allowed are integers >= 0"),
    ],
)
def test_kinds_and_values(variant, arguments, message):
    layer = MLASelfAttention(CONFIGS[variant])
    with pytest.raises(ValueError, match=message) as error:
        layer(**{"hidden_states": torch.randn(4, 2, H), **arguments})
    assert "\n" not in str(error.value)


def test_indices_are_a_tensor():
    with pytest.raises(ValueError, match="topk_indices: given list, allowed is a Tensor"):
        MLASelfAttention(CONFIGS["dsa"])(torch.randn(4, 2, H), topk_indices=[[[0]]])


@pytest.mark.parametrize(
    ("layer", "owner", "message"),
    [
        ("dense", tiny(kv_lora_rank=40), r"cache: built for keys of width 56, allowed is this layer's .*48"),
        ("dsa", tiny(**INDEXER, kv_lora_rank=40), r"cache: built for keys of width 56, allowed is this layer's .*48"),
        ("dsa", CONFIGS["dense"], "cache: built for indexer keys of width None, allowed is this layer's .*16"),
        ("dense", CONFIGS["dsa"], "cache: built for indexer keys of width 16, allowed is this layer's .*None"),
    ],
)
def test_a_cache_of_another_layer(layer, owner, message):
    cache = cache_of(owner)
    with pytest.raises(ValueError, match=message) as error:
        MLASelfAttention(CONFIGS[layer])(torch.randn(4, 2, H), cache=cache)
    assert "\n" not in str(error.value)
    assert cache.length == 0


@pytest.mark.parametrize("variant", CONFIGS)
def test_a_cache_of_another_floating_dtype_serves(variant):
    layer, hidden = MLASelfAttention(CONFIGS[variant]), torch.randn(6, 2, H)
    with torch.no_grad():
        expected = layer(hidden)[0]
        cache = cache_of(layer.config, torch.float64)
        found = torch.cat([layer(hidden[:5], cache=cache)[0], layer(hidden[5:], cache=cache)[0]])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cache_of(tiny(), torch.int32), "dtype: given torch.int32, allowed are floating-point dtypes"),
        (lambda: LatentCache(tiny(), True, 8, device="cpu", dtype=torch.float32), "batch_size: given True"),
        (lambda: LatentCache(tiny(), 2, 8.5, device="cpu", dtype=torch.float32), "max_length: given 8.5"),
        (lambda: PackedSeqParams([0, 2.5, 4]), r"cu_seqlens_q: given \[0, 2.5, 4\], allowed are integers"),
        (lambda: PackedSeqParams([False, True]), r"cu_seqlens_q: given \[False, True\], allowed are integers"),
        (lambda: RotaryEmbedding(8, 1.0), "base: given 1.0, allowed are finite numbers above 1"),
        (lambda: YarnRotaryEmbedding(8, float("inf"), 2.0, 10), "base: given inf, allowed are finite numbers above 1"),
        (lambda: RotaryEmbedding(8.0, 1e4), "dim: given 8.0"),
        (lambda: RotaryEmbedding(8, 1e4).cos_sin(-3, device="cpu"), "length: given -3, allowed are integers >= 0"),
        (lambda: MLASelfAttention("glm5"), "config: given str, allowed is an MLAConfig"),
    ],
)
def test_constructors(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
