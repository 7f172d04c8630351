"""The indexer's loss: its value, whom it trains, when it exists, and how it reaches a caller."""

import copy
import math
from functools import partial

import pytest
import torch

from mla_attention import PackedSeqParams
from mla_attention.communication import Communication
from mla_attention.dsa.loss import attach_loss, indexer_loss
from mla_attention.fusions import reference
from mla_attention.token_layout import TokenLayout
from tests.mla_attention.dsa.oracle import build, dsa_config, oracle

LENGTH, BATCH, COEFF = 24, 2, 0.3
SUPPORTS = {
    "dense": {},
    "sparse": {"dsa_indexer_use_sparse_loss": True},
    "warm-up": {"dsa_mode": "dense_warmup"},
    "warm-up of a sparse loss": {"dsa_mode": "dense_warmup", "dsa_indexer_use_sparse_loss": True},
    "few keys": {"dsa_indexer_topk": 64},
    "few keys, sparse": {"dsa_indexer_topk": 64, "dsa_indexer_use_sparse_loss": True},
    "recompute": {"recompute_up_proj": True, "dsa_indexer_use_sparse_loss": True},
    "no relu": {"dsa_indexer_scoring_relu": False},
    "one row a tile": {"dsa_score_budget_bytes": 1},
}


def hidden_states(batch=BATCH, seed=1):
    return torch.randn(LENGTH, batch, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer_with(**extra):
    return build(dsa_config(**{"dsa_indexer_loss_coeff": COEFF, **extra}))


def indexer_gradients(layer):
    return {n: p.grad for n, p in layer.named_parameters() if "indexer" in n}


def trunk_gradients(layer):
    return {n: p.grad for n, p in layer.named_parameters() if "indexer" not in n}


def expected_loss(layer, hidden, per_token=False):
    config = layer.config
    sparse = config.dsa_indexer_use_sparse_loss and config.dsa_mode == "sparse"
    rows = []
    for b in range(hidden.shape[1]):
        answer = oracle(layer, hidden[:, b])
        rows.append(answer.sparse_kl if sparse else answer.dense_kl)
    rows = torch.cat(rows)
    return COEFF * (rows.sum() if per_token else rows.mean())


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("per_token", [False, True])
def test_value_and_gradient_are_the_equations(support, per_token):
    layer = layer_with(calculate_per_token_loss=per_token, **SUPPORTS[support])
    hidden = hidden_states().requires_grad_()
    loss = layer(hidden, return_aux=True)[2].indexer_loss
    assert loss.shape == ()
    expected = expected_loss(layer, hidden.detach(), per_token)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    parameters = list(layer.core_attention.indexer.parameters())
    found, wanted = torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    assert all(gradient.any() for gradient in wanted)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("support", SUPPORTS)
def test_the_returned_loss_trains_the_indexer_and_nothing_else(support):
    layer, hidden = layer_with(**SUPPORTS[support]), hidden_states().requires_grad_()
    layer(hidden, return_aux=True)[2].indexer_loss.backward()
    assert hidden.grad is None or not hidden.grad.any()
    assert all(gradient is None or not gradient.any() for gradient in trunk_gradients(layer).values())
    assert all(gradient.any() for gradient in indexer_gradients(layer).values())


@pytest.mark.parametrize("support", SUPPORTS)
def test_exactly_one_of_attached_and_returned(support):
    attached, returned = layer_with(**SUPPORTS[support]), layer_with(**SUPPORTS[support])
    ours, theirs = hidden_states().requires_grad_(), hidden_states().requires_grad_()
    direction = torch.randn(LENGTH, BATCH, 64, dtype=torch.float64)
    output, _ = attached(ours)
    other, _, aux = returned(theirs, return_aux=True)
    assert torch.equal(output, other)
    (output * direction).sum().backward()
    (other * direction).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    for name, gradient in trunk_gradients(attached).items():
        assert torch.equal(gradient, trunk_gradients(returned)[name]), name
    assert all(gradient is None for gradient in indexer_gradients(returned).values())  # not attached
    aux.indexer_loss.backward()
    for name, gradient in indexer_gradients(attached).items():  # attached, whatever the output's own gradient is
        torch.testing.assert_close(gradient, indexer_gradients(returned)[name], rtol=1e-12, atol=1e-14)


def test_an_attached_loss_takes_the_callers_scale():
    plain, scaled, hidden = layer_with(), layer_with(), hidden_states()
    scaled.core_attention.attached_loss_scale = 0.25
    for layer in (plain, scaled):
        layer(hidden)[0].sum().backward()
    for name, gradient in indexer_gradients(plain).items():
        torch.testing.assert_close(indexer_gradients(scaled)[name], 0.25 * gradient, rtol=1e-12, atol=1e-14)


def test_attaching_leaves_values_and_gradients():
    output = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    loss = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(3, 4, dtype=torch.float64)
    result = attach_loss(output, loss, 0.5)
    assert torch.equal(result, output)
    (result * direction).sum().backward()
    assert torch.equal(output.grad, direction)
    assert loss.grad.item() == 0.5


@pytest.mark.parametrize("per_token", [False, True])
def test_rows_without_a_token_count_nowhere(per_token):
    packed = PackedSeqParams([0, 2, 3], cu_seqlens_q_padded=[0, 4, 6])
    tokens = TokenLayout(1, 7, *torch.zeros(2, 4, 1, 1, 16), packed=packed)
    held, config = [0, 1, 4], dsa_config(dsa_indexer_loss_coeff=COEFF, calculate_per_token_loss=per_token)
    divergence = torch.full((1, 7), torch.nan, dtype=torch.float64)
    divergence[0, held] = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    loss = indexer_loss(divergence.requires_grad_(), tokens, config, Communication())
    assert loss.item() == pytest.approx(COEFF * (9.0 if per_token else 3.0), rel=1e-15)
    loss.backward()
    expected = torch.zeros(1, 7, dtype=torch.float64)
    expected[0, held] = COEFF if per_token else COEFF / 3
    torch.testing.assert_close(divergence.grad, expected)


OFF = {
    "no coefficient": lambda layer: build(dsa_config(**{"dsa_mode": layer.config.dsa_mode})),
    "eval": lambda layer: layer.eval(),
}


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("return_aux", [False, True])
@pytest.mark.parametrize("mode", ["sparse", "dense_warmup"])
def test_nothing_is_computed_or_saved_when_it_is_off(off, return_aux, mode, monkeypatch):
    layer, hidden = OFF[off](layer_with(dsa_mode=mode)), hidden_states().requires_grad_()
    monkeypatch.setattr("mla_attention.dsa.token_axis.TokenAxis.indexer_kl", None)  # calling it would raise
    if mode == "dense_warmup":
        layer.core_attention.indexer.forward = None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = layer(hidden, return_aux=return_aux)
    indexer = {p.untyped_storage().data_ptr() for p in layer.core_attention.indexer.parameters()}
    assert not any(t.untyped_storage().data_ptr() in indexer for t in saved)
    if return_aux:
        assert result[2].indexer_loss is None
    result[0].sum().backward()
    assert all(gradient is None for gradient in indexer_gradients(layer).values())


def test_without_a_graph_it_is_computed_only_where_asked_for(monkeypatch):
    layer, hidden = layer_with(), hidden_states()
    expected = layer(hidden, return_aux=True)[2].indexer_loss
    with torch.no_grad():
        assert layer(hidden, return_aux=True)[2].indexer_loss.equal(expected.detach())
        monkeypatch.setattr("mla_attention.dsa.token_axis.TokenAxis.indexer_kl", None)
        layer(hidden)


def test_a_frozen_indexer_has_nothing_attached(monkeypatch):
    layer = layer_with()
    layer.core_attention.indexer.requires_grad_(False)
    monkeypatch.setattr("mla_attention.dsa.token_axis.TokenAxis.indexer_kl", None)
    layer(hidden_states())[0].sum().backward()


@pytest.mark.parametrize("return_aux", [False, True])
def test_a_warm_up_trains_the_indexer_of_a_frozen_layer(return_aux):
    layer = layer_with(dsa_mode="dense_warmup")
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("indexer" in name)
    result = layer(hidden_states(), return_aux=return_aux)
    (result[2].indexer_loss if return_aux else result[0].sum()).backward()
    assert all(gradient.any() for gradient in indexer_gradients(layer).values())
    assert all(gradient is None for gradient in trunk_gradients(layer).values())


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("support", ["dense", "sparse", "warm-up"])
def test_microbatches_do_not_matter(per_token, support):
    hidden = hidden_states(4)
    whole = layer_with(calculate_per_token_loss=per_token, **SUPPORTS[support])
    parts = copy.deepcopy(whole)
    loss = whole(hidden, return_aux=True)[2].indexer_loss
    loss.backward()
    total = 0.0
    for piece in hidden.split(1, dim=1):
        own = parts(piece, return_aux=True)[2].indexer_loss * (1.0 if per_token else 0.25)
        own.backward()
        total += own.item()
    assert total == pytest.approx(loss.item(), rel=1e-12)
    for name, gradient in indexer_gradients(whole).items():
        torch.testing.assert_close(indexer_gradients(parts)[name], gradient, rtol=1e-10, atol=1e-14)


def test_no_epsilon_in_the_divergence():
    """All attention on one key that the indexer gives 1e-12 of its mass: ln(1e12) = 27.631, gradient -1 and 1."""
    exact, log_mass = partial(torch.tensor, dtype=torch.float64), math.log(1e12)
    query, key = exact([[[0.0, 0.0]], [[1e4, 0.0]]]), exact([[1.0, 0.0], [0.0, 0.0]])
    index_q, index_k, weights = exact([[[0.0]], [[log_mass]]]), exact([[0.0], [1.0]]), exact([[1.0], [1.0]])
    kl = reference.indexer_kl(index_q, index_k.requires_grad_(), weights, query, key, 1.0)
    assert kl[0].item() == 0.0
    assert kl[1].item() == pytest.approx(27.631, abs=1e-3)
    kl[1].backward()
    assert index_k.grad[1, 0].item() / log_mass == pytest.approx(1.0, abs=1e-11)


def test_handing_a_warm_up_over_is_one_change_of_the_config():
    warm = layer_with(dsa_mode="dense_warmup")
    optimizer = torch.optim.Adam(warm.core_attention.indexer.parameters(), 0.01)
    hidden = hidden_states()
    first = last = None
    for _ in range(60):
        optimizer.zero_grad()
        loss = warm(hidden, return_aux=True)[2].indexer_loss
        loss.backward()
        optimizer.step()
        first, last = loss.item() if first is None else first, loss.item()
    assert last < 0.5 * first
    sparse, untrained = layer_with(dsa_indexer_use_sparse_loss=True), layer_with(dsa_indexer_use_sparse_loss=True)
    sparse.load_state_dict(warm.state_dict())
    dense_output = warm(hidden, return_aux=True)[0]  # the trunk, and so this, is the same in all three
    error, error_before = ((layer(hidden, return_aux=True)[0] - dense_output).norm() for layer in (sparse, untrained))
    assert error < error_before
