"""Generation with a cache equals the forward of the whole text, token by token and piece by piece."""

import pytest
import torch

from mla_attention import LatentCache
from tests.mla_attention.dsa.oracle import build, dsa_config

LENGTH, BATCH = 24, 3
CONFIGS = {
    "sparse": {},
    "interleaved": {"dsa_indexer_rope_interleaved": True},
    "hadamard": {"dsa_indexer_rotate_activation": True},
    "few keys": {"dsa_indexer_topk": 64},
    "some keys": {"dsa_indexer_topk": 12},
    "warm-up": {"dsa_mode": "dense_warmup"},
    "recompute": {"recompute_up_proj": True},
    "loss": {"dsa_indexer_loss_coeff": 1.0},
}
PIECES = {
    "token by token": [1] * LENGTH,
    "after a prompt": [10, *[1] * 14],
    "pieces": [3, 0, 9, 1, 11],
    "whole": [LENGTH],
}


def hidden_states(seed=1):
    return torch.randn(LENGTH, BATCH, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def generate(layer, hidden, pieces, **arguments):
    cache = LatentCache(layer.config, BATCH, LENGTH + 3, device="cpu", dtype=torch.float64)
    start, outputs, indices = 0, [], []
    for length in pieces:
        extra = {k: v[:, start : start + length] for k, v in arguments.items()}
        output, _, aux = layer(hidden[start : start + length], cache=cache, return_aux=True, **extra)
        assert aux.indexer_loss is None
        outputs.append(output)
        indices.append(aux.topk_indices)
        start += length
        assert cache.length == start
    return torch.cat(outputs), indices, cache


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pieces", PIECES)
def test_generation_equals_the_forward(name, pieces):
    layer, hidden = build(dsa_config(**CONFIGS[name])), hidden_states()
    with torch.no_grad():
        expected, _, aux = layer(hidden, return_aux=True)
        output, indices, _ = generate(layer, hidden, PIECES[pieces])
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    if name == "warm-up":
        assert indices == [None] * len(indices)
        return
    start = 0
    for found in indices:
        rows = aux.topk_indices[:, start : start + found.shape[1]]
        start += found.shape[1]
        assert found.shape[-1] == min(layer.config.dsa_indexer_topk, start)
        width = found.shape[-1]
        assert torch.equal(found, rows[..., :width])
        assert (rows[..., width:] == -1).all()


def test_position_ids():
    layer, hidden = build(dsa_config()), hidden_states()
    positions = torch.randint(0, 99, (BATCH, LENGTH))
    with torch.no_grad():
        expected = layer(hidden, position_ids=positions)[0]
        output, _, _ = generate(layer, hidden, PIECES["pieces"], position_ids=positions)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_shared_indices():
    layer, shared, hidden = build(dsa_config()), build(dsa_config(dsa_indexer_shared=True), seed=4), hidden_states()
    with torch.no_grad():
        indices = layer(hidden, return_aux=True)[2].topk_indices
        expected = shared(hidden, topk_indices=indices)[0]
        output, _, cache = generate(shared, hidden, PIECES["pieces"], topk_indices=indices)
        assert cache.index_keys is None
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_tokens_that_came_with_indices_can_be_selected_later():
    layer, hidden = build(dsa_config()), hidden_states()
    with torch.no_grad():
        expected, _, aux = layer(hidden, return_aux=True)
        cache = LatentCache(layer.config, BATCH, LENGTH, device="cpu", dtype=torch.float64)
        cache.index_keys.fill_(torch.nan)
        layer(hidden[:20], cache=cache, topk_indices=aux.topk_indices[:, :20])
        output = layer(hidden[20:], cache=cache)[0]
    torch.testing.assert_close(output, expected[20:], rtol=1e-10, atol=1e-10)


def test_a_prompt_takes_gradients_as_without_a_cache():
    layer = build(dsa_config())
    ours, theirs = hidden_states().requires_grad_(), hidden_states().requires_grad_()
    cache = LatentCache(layer.config, BATCH, LENGTH, device="cpu", dtype=torch.float64)
    layer(ours, cache=cache)[0].square().sum().backward()
    layer(theirs)[0].square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_reset_cache_starts_again():
    layer, hidden = build(dsa_config()), hidden_states()
    with torch.no_grad():
        _, _, cache = generate(layer, hidden, PIECES["pieces"])
        cache.reset()
        torch.testing.assert_close(layer(hidden[:9], cache=cache)[0], layer(hidden[:9])[0], rtol=1e-10, atol=1e-10)


def test_indices_past_the_cache_under_validation(monkeypatch):
    monkeypatch.setenv("MLA_ATTENTION_VALIDATE", "1")
    layer, hidden = build(dsa_config()), hidden_states()
    cache = LatentCache(layer.config, BATCH, LENGTH, device="cpu", dtype=torch.float64)
    layer(hidden[:10], cache=cache)
    with pytest.raises(ValueError, match=r"topk_indices: given 11 at .* allowed are -1 and key rows 0..10"):
        layer(hidden[10:11], cache=cache, topk_indices=torch.full((BATCH, 1, 1), 11))
    assert cache.length == 10
