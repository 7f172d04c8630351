"""Heads in groups: the same results and gradients, and when a layer attends so."""

import pytest
import torch

from mla_attention import MLASelfAttention, PackedSeqParams, head_groups
from mla_attention.configs import tiny


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
    for fields in ({"num_attention_heads": 5}, {"kv_assembly": "split"}, {"recompute_up_proj": True}):
        assert head_groups.head_groups(build(**fields), on_gpu) == 1
    on_gpu.shape = torch.Size([16, 1, 48])
    assert head_groups.head_groups(layer, on_gpu) == 1
