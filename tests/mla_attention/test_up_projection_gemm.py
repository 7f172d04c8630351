"""The up-projection's GEMMs on tensors where they lie, against autograd through the plain formula."""

import pytest
import torch

from mla_attention.up_projection_gemm import _FEW_HEADS, up_project_gradients, up_project_into

TOKENS, RANK, K_DIM, EMB, V_DIM = 7, 5, 6, 4, 3


@pytest.mark.parametrize("heads", [1, 3, _FEW_HEADS, _FEW_HEADS + 1, 20])
def test_values_and_gradients(heads):
    torch.manual_seed(heads)
    new = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    latent, weight = new(TOKENS, RANK).requires_grad_(), new(heads * (K_DIM + V_DIM), RANK).requires_grad_()
    kv = torch.einsum("tr,her->the", latent, weight.view(heads, K_DIM + V_DIM, RANK))
    key = torch.full((TOKENS, heads, K_DIM + EMB), 7.0, dtype=torch.float64)
    value = torch.full((TOKENS, heads, V_DIM), float("nan"), dtype=torch.float64)
    up_project_into(latent.detach(), weight.detach(), key, value)
    torch.testing.assert_close(key[..., :K_DIM], kv[..., :K_DIM], rtol=0, atol=1e-13)
    torch.testing.assert_close(value, kv[..., K_DIM:], rtol=0, atol=1e-13)
    assert (key[..., K_DIM:] == 7.0).all()

    dkey, dvalue = new(*key.shape), new(*value.shape)  # the rope channels carry gradients that are not this GEMM's
    found = up_project_gradients(latent.detach(), weight.detach(), dkey, dvalue)
    expected = torch.autograd.grad(kv, (latent, weight), torch.cat([dkey[..., :K_DIM], dvalue], dim=-1))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
