"""Heads in groups: the same results and gradients, and when a layer attends so."""

import pytest
import torch

from mla_attention import MLASelfAttention, PackedSeqParams, head_groups
from mla_attention.configs import tiny
from mla_attention.output_projection import project_contexts


def build(**fields):
    torch.manual_seed(0)
    return MLASelfAttention(tiny(**fields), dtype=torch.float64)


def step(layer, hidden, direction, **arguments):
    output = layer(hidden, return_aux=True, **arguments)
    found = torch.autograd.grad(output[0], [hidden, *layer.parameters()], direction)
    return output[0], output[2].max_attention_logits, found


@pytest.mark.parametrize("fields", [{}, {"q_lora_rank": None}, {"rope_type": "rope", "mla_down_proj_fusion": True}])
@pytest.mark.parametrize("packing", [False, True])
def test_two_groups_equal_one(monkeypatch, fields, packing):
    layer = build(qk_clip=True, **fields)
    hidden = torch.randn(7, 1 if packing else 2, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(hidden)
    arguments = {"packed_seq_params": PackedSeqParams([0, 2, 7])} if packing else {}
    plain = step(layer, hidden, direction, **arguments)
    asked = []
    monkeypatch.setattr("mla_attention.attention.head_groups", lambda *_: asked.append(1) or 2)
    grouped = step(layer, hidden, direction, **arguments)
    assert asked
    torch.testing.assert_close(grouped[0], plain[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(grouped[1], plain[1], rtol=0, atol=1e-12)
    for a, b in zip(grouped[2], plain[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_only_large_training_steps_on_a_gpu_are_grouped(monkeypatch):
    layer = build()
    latent = torch.randn(4, 1, layer.config.q_lora_rank)
    assert head_groups.head_groups(layer, latent) == 1  # a CPU
    on_gpu = type("OnGPU", (), {"is_cuda": True, "shape": torch.Size([2**20, 1, 48]), "element_size": lambda self: 2})()
    assert head_groups.head_groups(layer, on_gpu) == 2
    with torch.no_grad():
        assert head_groups.head_groups(layer, on_gpu) == 1
    handle = layer.linear_q_up_proj.register_forward_hook(lambda *_: None)
    assert head_groups.head_groups(layer, on_gpu) == 1
    handle.remove()
    handle = layer.linear_proj.register_forward_pre_hook(lambda *_: None)
    assert head_groups.head_groups(layer, on_gpu) == 1
    handle.remove()
    for fields in ({"num_attention_heads": 5}, {"kv_assembly": "split"}, {"recompute_up_proj": True}):
        assert head_groups.head_groups(build(**fields), on_gpu) == 1
    on_gpu.shape = torch.Size([16, 1, 48])
    assert head_groups.head_groups(layer, on_gpu) == 1


def test_the_output_projection_of_groups_makes_contiguous_gradients_and_keeps_no_concatenation():
    layer = build()
    heads, width = layer.config.num_attention_heads, layer.config.v_head_dim
    contexts = tuple(torch.randn(5, 2, heads // 2, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = project_contexts(layer.linear_proj, contexts)
    own = {t.untyped_storage().data_ptr() for t in (*contexts, layer.linear_proj.weight)}
    assert {t.untyped_storage().data_ptr() for t in kept} <= own
    direction = torch.randn_like(output)
    leaves = (*contexts, layer.linear_proj.weight)
    found = torch.autograd.grad(output, leaves, direction, retain_graph=True)
    assert all(g.is_contiguous() for g in found)
    plain = layer.linear_proj(torch.cat(contexts, dim=-2).flatten(-2))
    assert torch.equal(output, plain)
    for a, b in zip(found, torch.autograd.grad(plain, leaves, direction), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    (only,) = torch.autograd.grad(output, contexts[:1], direction)
    assert torch.equal(only, found[0])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_frozen_output_projection_and_autocast(monkeypatch, autocast):
    layer = build().float()
    layer.linear_proj.weight.requires_grad_(False)
    hidden = torch.randn(7, 2, layer.config.hidden_size, requires_grad=True)

    def run() -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = layer(hidden)[0]
        output.float().square().sum().backward()
        found = [output.detach(), hidden.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]
        hidden.grad = None
        layer.zero_grad()
        return found

    plain = run()
    monkeypatch.setattr("mla_attention.attention.head_groups", lambda *_: 2)
    for a, b in zip(run(), plain, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=(2e-2 if autocast else 1e-5) * b.abs().max().item())
