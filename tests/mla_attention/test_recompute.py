"""Recomputed up projections where a module's parameters are not the same in backward as they were in forward."""

import pytest
import torch
from torch.func import functional_call

from mla_attention import MLASelfAttention
from mla_attention.configs import tiny

DSA = dict(experimental_attention_variant="dsa", dsa_indexer_n_heads=2, dsa_indexer_head_dim=16, dsa_indexer_topk=4)


@pytest.mark.parametrize(
    "config",
    [
        tiny(recompute_up_proj=True),
        tiny(recompute_up_proj=True, q_lora_rank=None),
        tiny(recompute_up_proj=True, kv_assembly="gemm"),
        tiny(recompute_up_proj=True, **DSA),
    ],
)
def test_functional_call_gives_the_gradients_of_the_tensors_it_was_given(config):
    torch.manual_seed(0)
    layer = MLASelfAttention(config, dtype=torch.float64)
    hidden = torch.randn(12, 2, config.hidden_size, dtype=torch.float64)
    own = {name: p.detach().clone() for name, p in layer.named_parameters()}
    lent = {name: (1.7 * p.detach()).requires_grad_() for name, p in layer.named_parameters()}
    functional_call(layer, {name: p + 0 for name, p in lent.items()}, (hidden,))[0].square().sum().backward()
    assert all(p.grad is None and torch.equal(p, own[name]) for name, p in layer.named_parameters())

    layer.load_state_dict(lent)
    layer(hidden)[0].square().sum().backward()
    for name, p in layer.named_parameters():
        if "indexer" not in name:
            torch.testing.assert_close(lent[name].grad, p.grad, rtol=1e-12, atol=1e-12)


def test_a_parameter_changed_in_place_before_backward_is_refused():
    layer = MLASelfAttention(tiny(recompute_up_proj=True))
    loss = layer(torch.randn(4, 2, layer.config.hidden_size))[0].sum()
    with torch.no_grad():
        layer.linear_kv_up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight changed in place between forward and backward; allowed") as error:
        loss.backward()
    assert "\n" not in str(error.value)
