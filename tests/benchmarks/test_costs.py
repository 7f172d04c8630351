"""The FLOP and byte formulas against brute force and against published numbers."""

import pytest

from mla_attention.configs import deepseek_v3, deepseek_v32, glm5, tiny

GIB = 2.0**30


def dense(preset):
    return preset(experimental_attention_variant=None)


def test_weight_elements_are_those_of_the_module(script):
    from mla_attention import MLASelfAttention

    for config in (tiny(), tiny(q_lora_rank=None)):
        layer = MLASelfAttention(config, device="meta")
        counted = {n.removesuffix(".weight"): p.numel() for n, p in layer.named_parameters() if "norm" not in n}
        assert script("costs").weight_elements(config) == counted


@pytest.mark.parametrize(
    ("preset", "gemm", "forward", "backward"), [(deepseek_v3, 18.4, 11.0, 28.6), (glm5, 16.2, 8.8, 22.0)]
)
def test_step_flops_at_16k(script, preset, gemm, forward, backward):
    costs = script("costs")
    config = dense(preset)
    assert 3 * costs.gemm_flops(config, 16384) / 1e12 == pytest.approx(gemm, abs=0.05)
    measured = [f / 1e12 for f in costs.attention_flops(config, [16384])]
    assert measured == pytest.approx([forward, backward], abs=0.05)
    assert costs.dense_layer_flops(config, [16384]) / 1e12 == pytest.approx(gemm + forward + backward, abs=0.1)


def test_packed_attention_costs_the_sum_of_its_sequences(script):
    costs = script("costs")
    config = dense(glm5)
    whole, parts = costs.attention_flops(config, [4096]), costs.attention_flops(config, [2048, 2048])
    assert parts == tuple(f // 2 for f in whole)


def test_lower_bound_bytes(script):
    lower = script("costs").lower_bound_bytes
    assert lower(dense(deepseek_v3), 4096) / GIB == pytest.approx(1.25)
    assert lower(dense(glm5), 16384) / GIB == pytest.approx(4.0)


@pytest.mark.parametrize(("tokens", "topk"), [(1, 1), (5, 2), (7, 7), (6, 100), (2050, 2048)])
def test_selected_pairs(script, tokens, topk):
    assert script("costs").selected_pairs(tokens, topk) == sum(min(row + 1, topk) for row in range(tokens))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (2, 9), (2048, 32768)])
def test_causal_pairs(script, queries, keys):
    assert script("costs").causal_pairs(queries, keys) == sum(range(keys - queries + 1, keys + 1))


def test_sparse_formulas(script):
    costs = script("costs")
    assert costs.sparse_mla_flops(4096 * 2048, 64, 512, 64)[0] == 4096 * 2048 * 64 * 2 * (576 + 512)
    assert costs.sparse_mla_flops(10, 3, 8, 4)[1] == 2 * 10 * 3 * (3 * 12 + 2 * 8)
    assert costs.indexer_flops(100, 32, 128) == 2 * 100 * 32 * 128


def test_sparse_layer_passes_dense_between_10k_and_20k_tokens_by_flops(script):
    costs = script("costs")
    for preset, low, high in ((glm5, 8192, 16384), (deepseek_v32, 12288, 24576)):
        config = preset()
        for tokens, cheaper in ((low, False), (high, True)):
            sparse, full = costs.dsa_layer_flops(config, tokens), costs.dense_layer_flops(dense(preset), [tokens])
            assert (sparse < full) is cheaper, (preset.__name__, tokens)


def test_indexer_elements(script):
    from mla_attention import MLASelfAttention

    config = tiny(
        experimental_attention_variant="dsa", dsa_indexer_n_heads=4, dsa_indexer_head_dim=32, dsa_indexer_topk=8
    )
    layer = MLASelfAttention(config, device="meta")
    named = dict(layer.core_attention.indexer.named_parameters())
    assert script("costs").indexer_elements(config) == sum(p.numel() for n, p in named.items() if "norm" not in n)
