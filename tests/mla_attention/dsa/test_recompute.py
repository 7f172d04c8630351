"""What is computed again in backward changes nothing: recompute_up_proj, checkpoints; copies and pickles of a layer."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.mla_attention.dsa.oracle import build, dsa_config

LENGTH = 24
CONFIGS = {
    "sparse loss": {"dsa_indexer_use_sparse_loss": True},
    "dense loss": {},
    "warm-up": {"dsa_mode": "dense_warmup"},
    "few keys": {"dsa_indexer_topk": 64},
    "tiles": {"dsa_score_budget_bytes": 4000},
}


def hidden_states():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(LENGTH, 2, 64, dtype=torch.float64, generator=generator).requires_grad_()


def layer_with(**extra):
    return build(dsa_config(dsa_indexer_loss_coeff=0.5, **extra))


def step(layer, run=lambda layer, hidden: layer(hidden)[0]):
    """Output and all gradients of one training step, the indexer's loss attached."""
    hidden = hidden_states()
    layer.zero_grad()
    output = run(layer, hidden)
    output.square().sum().backward()
    return [output, hidden.grad, *(p.grad for p in layer.parameters())]


def same(found, expected, **tolerance):
    for own, other in zip(found, expected, strict=True):
        if tolerance:
            torch.testing.assert_close(own, other, **tolerance)
        else:
            assert torch.equal(own, other)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recompute_up_proj", [False, True])
def test_a_checkpointed_layer(name, use_reentrant, recompute_up_proj):
    layer = layer_with(recompute_up_proj=recompute_up_proj, **CONFIGS[name])
    expected = step(layer)
    run = lambda layer, hidden: checkpoint(lambda x: layer(x)[0], hidden, use_reentrant=use_reentrant)  # noqa: E731
    same(step(layer, run), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_returned_loss_crosses_a_checkpoint(use_reentrant):
    def block(hidden):
        output, _, aux = layer(hidden, return_aux=True)
        return output, aux.indexer_loss

    def run(layer, hidden):
        output, loss = checkpoint(block, hidden, use_reentrant=use_reentrant)
        loss.backward(retain_graph=True)
        return output

    layer = layer_with()
    same(step(layer, run), step(layer), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CONFIGS)
def test_recomputed_operands(name):
    same(
        step(layer_with(recompute_up_proj=True, **CONFIGS[name])),
        step(layer_with(**CONFIGS[name])),
        rtol=1e-12,
        atol=1e-12,
    )


def test_recomputed_operands_are_not_kept():
    """Of the absorbed query `[S, B, n, Rkv+Dr]` nothing is alive between forward and backward."""
    width = 32 + 16

    def kept(recompute):
        layer, sizes = layer_with(recompute_up_proj=recompute, dsa_indexer_use_sparse_loss=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
            layer(hidden_states())
        return [size for size in sizes if size[-2:] == (4, width)]

    assert kept(False)
    assert not kept(True)


def test_a_copy_and_a_pickle_do_the_same_and_share_nothing():
    layer = layer_with()
    expected = [t.clone() for t in step(layer)]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        same(step(twin), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
    same(step(layer), expected)


def test_an_output_used_twice():
    def run(layer, hidden):
        output = layer(hidden)[0]
        return output + output.detach() * 0 + 0 * output

    layer = layer_with()
    same(step(layer, run), step(layer), rtol=1e-12, atol=1e-12)


def test_a_retained_graph_gives_the_same_gradients_again():
    layer = layer_with(recompute_up_proj=True, dsa_indexer_use_sparse_loss=True)
    hidden = hidden_states()
    output = layer(hidden)[0].square().sum()
    parameters = [hidden, *layer.parameters()]
    first = torch.autograd.grad(output, parameters, retain_graph=True)
    same(torch.autograd.grad(output, parameters), first)
