"""The indexer's projections, rotation and transform, each against the equations and against the faults people made."""

import pytest
import torch

from mla_attention import MLASelfAttention
from mla_attention.configs import tiny
from mla_attention.dsa.indexer import hadamard_transform
from tests.mla_attention.dsa.oracle import Faults, build, dsa_config, hadamard, oracle

LENGTH = 24
PREFIX = "core_attention.indexer."


def indexed_by(layer, hidden, position_ids=None):
    """What the layer's own indexer makes of `[S, B, H]`, taken at its exit."""
    found = []
    hook = layer.core_attention.indexer.register_forward_hook(lambda module, args, result: found.append(result))
    try:
        layer(hidden, position_ids=position_ids)
    finally:
        hook.remove()
    return found[0]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotate_activation", [False, True])
def test_queries_keys_and_weights_are_the_equations(interleaved, rotate_activation):
    config = dsa_config(dsa_indexer_rope_interleaved=interleaved, dsa_indexer_rotate_activation=rotate_activation)
    layer = build(config)
    hidden = torch.randn(LENGTH, 2, config.hidden_size, dtype=torch.float64)
    found = indexed_by(layer, hidden)
    for b in range(2):
        expected = oracle(layer, hidden[:, b])
        torch.testing.assert_close(found.query[:, b], expected.index_query, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.key[:, b], expected.index_key, rtol=1e-10, atol=1e-10)
        weights = hidden[:, b] @ layer.core_attention.indexer.linear_weights_proj.weight.T / (3 * 32) ** 0.5
        torch.testing.assert_close(found.weights[:, b], weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "fault", ["query_pairing", "key_pairing", "rope_last", "raw_latent", "rms_key_norm", "no_key_bias"]
)
def test_each_fault_of_query_or_key_is_seen_by_itself(interleaved, fault):
    layer = build(dsa_config(dsa_indexer_rope_interleaved=interleaved))
    hidden = torch.randn(LENGTH, 1, 64, dtype=torch.float64)
    found, wrong = indexed_by(layer, hidden), oracle(layer, hidden[:, 0], faults=Faults(**{fault: True}))
    differs = {
        "query": not torch.allclose(found.query[:, 0], wrong.index_query, atol=1e-3),
        "key": not torch.allclose(found.key[:, 0], wrong.index_key, atol=1e-3),
    }
    query_faults, key_faults = (
        ("query_pairing", "raw_latent", "rope_last"),
        ("key_pairing", "rms_key_norm", "no_key_bias"),
    )
    assert differs["query"] == (fault in query_faults)
    assert differs["key"] == (fault in (*key_faults, "rope_last"))


def test_the_rotation_follows_position_ids():
    layer = build(dsa_config())
    hidden = torch.randn(LENGTH, 2, 64, dtype=torch.float64)
    positions = torch.randint(0, 100, (2, LENGTH))
    found = indexed_by(layer, hidden, positions)
    for b in range(2):
        expected = oracle(layer, hidden[:, b], positions=positions[b])
        torch.testing.assert_close(found.query[:, b], expected.index_query, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.key[:, b], expected.index_key, rtol=1e-10, atol=1e-10)


def test_the_weights_of_a_bfloat16_layer_are_fp32():
    layer = build(dsa_config(), torch.bfloat16)
    found = indexed_by(layer, torch.randn(LENGTH, 1, 64, dtype=torch.bfloat16))
    assert found.weights.dtype == torch.float32
    assert found.query.dtype == found.key.dtype == torch.bfloat16


def test_a_norm_that_answers_in_fp32_as_under_autocast_leaves_the_keys_dtype():
    layer = build(dsa_config(), torch.bfloat16)
    layer.core_attention.indexer.k_norm.register_forward_hook(lambda module, args, output: output.float())
    found = indexed_by(layer, torch.randn(LENGTH, 1, 64, dtype=torch.bfloat16))
    assert found.query.dtype == found.key.dtype == torch.bfloat16


def test_state_dict_is_the_dense_one_and_five_indexer_keys():
    dense = set(build(tiny()).state_dict())
    own = {"linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias", "linear_weights_proj.weight"}
    state = build(dsa_config()).state_dict()
    assert set(state) == dense | {PREFIX + name for name in own}
    assert {k.removeprefix(PREFIX): tuple(v.shape) for k, v in state.items() if k.startswith(PREFIX)} == {
        "linear_wq_b.weight": (3 * 32, 48),
        "linear_wk.weight": (32, 64),
        "k_norm.weight": (32,),
        "k_norm.bias": (32,),
        "linear_weights_proj.weight": (3, 64),
    }
    assert set(build(dsa_config(dsa_indexer_shared=True)).state_dict()) == dense


def test_fresh_parameters_have_the_stated_distribution():
    torch.manual_seed(0)
    indexer = MLASelfAttention(dsa_config(init_method_std=0.05)).core_attention.indexer
    assert indexer.linear_wq_b.weight.std().item() == pytest.approx(0.05, rel=0.1)
    assert indexer.linear_wk.weight.std().item() == pytest.approx(0.05, rel=0.1)
    assert torch.equal(indexer.k_norm.weight, torch.ones(32))
    assert torch.equal(indexer.k_norm.bias, torch.zeros(32))


def test_the_key_norms_epsilon_is_its_own():
    hidden = torch.randn(LENGTH, 1, 64, dtype=torch.float64) * 1e-3
    config = dsa_config(dsa_indexer_k_norm_epsilon=1e-2, layernorm_epsilon=1e-6)
    layer = build(config)
    found = indexed_by(layer, hidden)
    torch.testing.assert_close(found.key[:, 0], oracle(layer, hidden[:, 0]).index_key, rtol=1e-10, atol=1e-12)


def test_a_hook_that_keeps_a_projections_output_keeps_what_it_saw():
    layer = build(dsa_config())
    indexer, kept = layer.core_attention.indexer, []
    for module in (indexer.linear_wq_b, indexer.k_norm):
        module.register_forward_hook(lambda module, args, output: kept.append((output, output.clone())))
    layer(torch.randn(LENGTH, 2, 64, dtype=torch.float64))
    assert len(kept) == 2
    for output, copy in kept:
        assert torch.equal(output, copy)


class TestHadamard:
    def test_is_sylvesters_matrix_over_the_root_of_its_width(self):
        for width in (1, 2, 4, 32, 128, 512):
            x = torch.randn(5, 3, width, dtype=torch.float64)
            torch.testing.assert_close(hadamard_transform(x), x @ hadamard(width), rtol=1e-12, atol=1e-12)

    def test_keeps_dot_products_and_is_its_own_inverse(self):
        q, k = torch.randn(2, 40, 128)
        torch.testing.assert_close(
            (hadamard_transform(q) * hadamard_transform(k)).sum(-1), (q * k).sum(-1), rtol=1e-5, atol=1e-4
        )
        torch.testing.assert_close(hadamard_transform(hadamard_transform(q)), q, rtol=1e-5, atol=1e-5)

    def test_rounds_bfloat16_like_its_exact_value(self):
        x = torch.randn(64, 128).bfloat16()
        exact = x.double() @ hadamard(128)
        error = (hadamard_transform(x).double() - exact).abs()
        assert (error <= exact.abs() * 2**-7 + 1e-6).all()  # two roundings of 2^-8 / 2 each, and the factor's

    @pytest.mark.parametrize("width", [0, 3, 96])
    def test_refuses_other_widths(self, width):
        with pytest.raises(ValueError, match=f"last axis of {width}, allowed are powers of two"):
            hadamard_transform(torch.zeros(2, width))

    def test_on_both_sides_leaves_the_scores_and_on_one_does_not(self):
        hidden = torch.randn(LENGTH, 64, dtype=torch.float64)
        plain, both = build(dsa_config()), build(dsa_config(dsa_indexer_rotate_activation=True))
        expected = oracle(plain, hidden).scores
        torch.testing.assert_close(oracle(both, hidden).scores, expected, rtol=1e-10, atol=1e-10)
        one = oracle(both, hidden, faults=Faults(hadamard_one_side=True)).scores
        assert not torch.allclose(one, expected, atol=1e-2)

        def scores(layer):
            found = indexed_by(layer, hidden[:, None])
            dots = torch.einsum("shd,td->hst", found.query[:, 0], found.key[:, 0]).relu()
            return torch.einsum("hst,sh->st", dots, found.weights[:, 0])

        torch.testing.assert_close(scores(both), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(scores(plain), expected, rtol=1e-10, atol=1e-10)
