"""A second derivative is refused wherever it goes, and a first one is right whatever surrounds the backward."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mla_attention.fusions as fused
from mla_attention import MLASelfAttention
from mla_attention.configs import tiny
from tests.fusions.rope.support import DEVICE, random, tables

TWICE = "differentiated again"


def loss(t: torch.Tensor) -> torch.Tensor:
    """Of a fused rotation, beside a path that does have second derivatives."""
    rotated = fused.fused_mla_rope_out_of_place(t, *tables(3, 4), 2, 4)
    return (rotated**2).sum() + (t**3).sum()


def test_a_second_derivative_is_refused_though_another_path_leads_to_the_input():
    t = random(3, 1, 2, 6, grad=True)
    (first,) = torch.autograd.grad(loss(t), t, create_graph=True)
    (plain,) = torch.autograd.grad(loss(t), t)
    assert torch.equal(first, plain)
    with pytest.raises(RuntimeError, match=TWICE):
        torch.autograd.grad(first.sum(), t)
    with pytest.raises(RuntimeError, match=TWICE):
        first.sum().backward()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("wanted", ["hidden", "weights"])
def test_a_layer_without_kv_buffer_refuses_it_for_inputs_and_weights(monkeypatch, groups, wanted):
    monkeypatch.setattr("mla_attention.attention.head_groups", lambda *_: groups)
    layer = MLASelfAttention(tiny(kv_assembly="gemm"), dtype=torch.float64)
    hidden = torch.randn(7, 2, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(hidden)[0].sum(), hidden, create_graph=True)
    inputs = [hidden] if wanted == "hidden" else [layer.linear_kv_up_proj.weight]
    with pytest.raises(RuntimeError, match=TWICE):
        torch.autograd.grad(gradient.square().sum(), inputs)


def test_a_graph_of_the_gradient_is_no_second_derivative_yet():
    layer = MLASelfAttention(tiny(kv_assembly="gemm"))
    hidden = torch.randn(7, 2, layer.config.hidden_size, requires_grad=True)
    (plain,) = torch.autograd.grad(layer(hidden)[0].sum(), hidden)
    for output in (layer(hidden)[0], checkpoint(lambda h: layer(h)[0], hidden, use_reentrant=False)):
        (gradient,) = torch.autograd.grad(output.sum(), hidden, create_graph=True)
        assert torch.equal(gradient, plain)


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU's autocast")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("assembly", ["split", "gemm"])
def test_autocast_around_the_backward_alone_changes_nothing_of_ours(monkeypatch, assembly, groups):
    monkeypatch.setattr("mla_attention.attention.head_groups", lambda *_: groups)
    layer = MLASelfAttention(tiny(kv_assembly=assembly))
    output = layer(torch.randn(7, 2, layer.config.hidden_size))[0]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(output.sum(), layer.linear_kv_up_proj.weight, retain_graph=True)[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-2 * found[0].abs().max().item())


@pytest.mark.parametrize("groups", [1, 2])
def test_autocast_leaves_fp64_alone(monkeypatch, groups):
    monkeypatch.setattr("mla_attention.attention.head_groups", lambda *_: groups)
    layer = MLASelfAttention(tiny(kv_assembly="gemm"), dtype=torch.float64)
    hidden = torch.randn(7, 2, layer.config.hidden_size, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(hidden)[0]
    assert output.dtype == torch.float64
    assert torch.equal(output, layer(hidden)[0])


def test_an_empty_expanded_gradient():
    cos, sin = tables(4, 8)
    nothing = torch.ones(1, device=DEVICE).expand(0, 1, 2, 12)
    assert fused.shared_key_gradient(nothing, cos, sin).shape == (0, 1, 1, 8)
