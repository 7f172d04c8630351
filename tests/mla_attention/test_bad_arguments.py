"""Arguments of another kind than documented, or of another layer: named in one line before anything is computed."""

import pytest
import torch

from mla_attention import LatentCache, MLASelfAttention, PackedSeqParams, RotaryEmbedding, YarnRotaryEmbedding
from mla_attention.configs import tiny

INDEXER = dict(experimental_attention_variant="dsa", dsa_indexer_n_heads=2, dsa_indexer_head_dim=16, dsa_indexer_topk=4)
CONFIGS = {"dense": tiny(), "dsa": tiny(**INDEXER)}
H = CONFIGS["dense"].hidden_size


def yarn(**fields):
    return YarnRotaryEmbedding(8, 1e4, **(dict(factor=2.0, original_max_position_embeddings=10) | fields))


def clip(*arguments, **options):
    MLASelfAttention(tiny(qk_clip=True)).clip_qk(*arguments, **options)


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
        (
            dict(position_ids=torch.full((4,), 2**62)),
            "position_ids: given 4611686018427387904, allowed are",
        ),
        (
            dict(position_ids=torch.arange(4, device="meta")),
            "position_ids: given on meta, allowed is the device",
        ),
        (dict(hidden_states=None), "hidden_states: given None, allowed is a Tensor"),
        (dict(hidden_states=torch.zeros(4, 2, H, device="meta")), "hidden_states: given on meta, allowed is .* cpu"),
        (dict(hidden_states=torch.zeros(4, 2, H).to_sparse()), "hidden_states: given layout torch.sparse_coo, allowed"),
        (
            dict(cache=LatentCache(CONFIGS["dense"], 2, 8, device="meta", dtype=torch.float32)),
            "cache: (given on meta|built for indexer keys)",
        ),
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
        (lambda: MLASelfAttention(tiny(), "1"), "layer_number: given str, allowed is an int"),
        (lambda: MLASelfAttention(tiny(), dtype="fp32"), "dtype: given 'fp32', allowed are floating-point dtypes"),
        (lambda: MLASelfAttention(tiny(), dtype=torch.complex64), "dtype: given torch.complex64, allowed are floating"),
        (lambda: MLASelfAttention(tiny(), device="gpu"), "device: given 'gpu', allowed are a torch.device and names"),
        (
            lambda: LatentCache(None, 2, 8, device="cpu", dtype=torch.float32),
            "config: given None, allowed is an MLA",
        ),
        (lambda: cache_of(tiny(), torch.float8_e4m3fn), "dtype: given torch.float8_e4m3fn, allowed are floating-point"),
        (lambda: PackedSeqParams([0, 2**40]), "allowed are integers below 2\\*\\*31"),
        (lambda: PackedSeqParams(torch.zeros(2, device="meta").int()), "given on meta, which has no values to check"),
        (lambda: yarn(mscale=float("nan")), "mscale: given nan, allowed are finite numbers >= 0"),
        (lambda: yarn(factor=float("inf")), "factor: given inf, allowed are finite numbers >= 1"),
        (lambda: yarn(attention_factor="x"), "attention_factor: given 'x', allowed are finite numbers above 0"),
        (lambda: yarn(truncate=3), "truncate: given 3, allowed are True and False"),
        (lambda: RotaryEmbedding(8, None), "base: given None, allowed are finite numbers above 1"),
        (lambda: RotaryEmbedding(8, 1e4).cos_sin(2.5, device="cpu"), "length: given 2.5, allowed are integers >= 0"),
        (
            lambda: RotaryEmbedding(8, 1e4).cos_sin(2**50, device="cpu"),
            "length: given 1125899906842624, allowed",
        ),
        (lambda: clip(None), "max_logits: given None, allowed is a Tensor"),
        (lambda: clip(torch.ones(4), threshold="x"), "threshold: given 'x', allowed are finite numbers above 0"),
        (lambda: clip(torch.ones(4), alpha=2), "alpha: given 2, allowed are finite numbers >= 0 and <= 1"),
    ],
)
def test_constructors(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_logits_that_overflowed_leave_their_heads_alone():
    layer = MLASelfAttention(tiny(qk_clip=True))
    before = [p.detach().clone() for p in layer.parameters()]
    layer.clip_qk(torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0]))
    assert all(torch.equal(p, was) for p, was in zip(layer.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "config", [CONFIGS["dense"], CONFIGS["dsa"], tiny(**INDEXER, dsa_mode="dense_warmup"), tiny(recompute_up_proj=True)]
)
def test_a_layer_on_meta_runs_on_meta(config):
    layer = MLASelfAttention(config, device="meta")
    hidden = torch.randn(12, 1, H, device="meta", requires_grad=True)
    packed = PackedSeqParams(torch.zeros(3, dtype=torch.int32, device="meta"), max_seqlen_q=8, validate=False)
    for options in ({}, {"position_ids": torch.arange(12, device="meta")}, {"packed_seq_params": packed}):
        output = layer(hidden, **options)[0]
        output.sum().backward()
        assert output.is_meta
        assert output.shape == hidden.shape
        assert hidden.grad.is_meta
