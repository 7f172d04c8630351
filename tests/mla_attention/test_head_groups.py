"""Heads in groups: the same results and gradients, and when a layer attends so."""

from types import SimpleNamespace

import pytest
import torch

from mla_attention import MLASelfAttention, PackedSeqParams, head_groups
from mla_attention.configs import tiny
from mla_attention.layers.torch_layers import obstacle_to_bypassing
from mla_attention.output_projection import _ProjectGroups, project_contexts


class OnGPU:
    """A latent in bf16 as it would lie on a GPU."""

    is_cuda = True

    def __init__(self, shape):
        self.shape = torch.Size(shape)

    def element_size(self):
        return 2


ON_GPU = OnGPU([2**20, 1, 48])


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


def test_only_large_training_steps_on_a_gpu_are_grouped():
    layer = build()
    latent = torch.randn(4, 1, layer.config.q_lora_rank)
    assert head_groups.head_groups(layer, latent) == 1  # a CPU
    assert head_groups.head_groups(layer, ON_GPU) == 2
    with torch.no_grad():
        assert head_groups.head_groups(layer, ON_GPU) == 1
    for fields in ({"num_attention_heads": 5}, {"kv_assembly": "split"}, {"recompute_up_proj": True}):
        assert head_groups.head_groups(build(**fields), ON_GPU) == 1
    assert head_groups.head_groups(layer, OnGPU([16, 1, 48])) == 1


def test_whoever_watches_core_attention_sees_all_heads_at_once():
    layer = build()
    for module in (layer.core_attention, layer.core_attention.choices["sdpa"]):
        handle = module.register_forward_hook(lambda *_: None)
        assert head_groups.head_groups(layer, ON_GPU) == 1
        handle.remove()
    assert head_groups.head_groups(layer, ON_GPU) == 2


BYPASSED = ("linear_q_up_proj", "linear_kv_up_proj", "linear_proj")
WATCHES = (
    *("register_forward_hook", "register_forward_pre_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook"),
)


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("name", BYPASSED)
def test_a_layer_that_somebody_watches_is_called(name, watch):
    layer = build()
    linear = getattr(layer, name)
    assert obstacle_to_bypassing(linear) is None
    handle = getattr(linear, watch)(lambda *_: None)
    assert obstacle_to_bypassing(linear) == "has hooks"
    assert head_groups.head_groups(layer, ON_GPU) == 1
    handle.remove()
    assert head_groups.head_groups(layer, ON_GPU) == 2


def test_other_ways_to_take_part_in_a_call_are_seen():
    layer = build()
    linear = layer.linear_proj
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    assert "hooks of all modules" in obstacle_to_bypassing(linear)
    handle.remove()
    linear.forward = lambda x: x
    assert obstacle_to_bypassing(linear) == "has a forward of its own"
    del linear.forward
    assert obstacle_to_bypassing(torch.nn.Linear(2, 2)) == "is a Linear"
    torch.nn.utils.parametrizations.weight_norm(linear)
    assert obstacle_to_bypassing(linear) == "is a ParametrizedLinear"
    assert head_groups.head_groups(layer, ON_GPU) == 1


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


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, True), (True, False, True), (True, True, False)])
def test_only_wanted_gradients_are_computed(monkeypatch, wanted):
    weight, *contexts = (
        torch.randn(*shape, requires_grad=w) for shape, w in zip([(5, 6), (4, 3), (4, 3)], wanted, strict=True)
    )
    products = []
    context = SimpleNamespace(saved_tensors=(weight, *contexts), needs_input_grad=wanted)
    monkeypatch.setattr(torch, "mm", lambda *_, out: products.append(out))
    with torch.no_grad():
        found = _ProjectGroups.backward(context, torch.ones(4, 5))
    assert [g is not None for g in found] == list(wanted)
    assert len(products) == 2 * wanted[0]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_output_projection_and_autocast(monkeypatch, frozen, autocast):
    layer = build().float()
    layer.linear_proj.weight.requires_grad_(not frozen)
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
