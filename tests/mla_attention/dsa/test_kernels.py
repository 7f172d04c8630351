"""The whole sparse layer on the kernels, in Triton's interpreter, against the same layer on the unfused twins."""

import pytest
import torch

from mla_attention import PackedSeqParams, fusions
from mla_attention.dsa.functions import dsa_functions
from mla_attention.fusions import reference
from tests.mla_attention.dsa.oracle import build, dsa_config

LENGTH = 12
CASES = {
    "sparse loss": {"dsa_indexer_use_sparse_loss": True},
    "dense loss": {"dsa_indexer_rope_interleaved": True},
    "warm-up": {"dsa_mode": "dense_warmup"},
    "recompute": {"recompute_up_proj": True, "dsa_indexer_use_sparse_loss": True},
    "no relu, hadamard": {"dsa_indexer_scoring_relu": False, "dsa_indexer_rotate_activation": True},
    "3 heads": {"num_attention_heads": 3, "dsa_indexer_topk": 5},
}


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


def step(layer, hidden, **arguments):
    """Output, loss, indices and all gradients of one training step."""
    hidden = hidden.clone().requires_grad_()
    output, _, aux = layer(hidden, return_aux=True, **arguments)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    (output * direction).sum().backward()
    aux.indexer_loss.backward()
    found = {"output": output, "loss": aux.indexer_loss, "hidden": hidden.grad}
    return found | {name: p.grad for name, p in layer.named_parameters()}, aux.topk_indices


def pair(**extra):
    """(fused rope and kernels, unfused rope and twins) with the same fp32 parameters."""
    config = {"dsa_indexer_loss_coeff": 1.0, **extra}
    fused, unfused = (build(dsa_config(apply_rope_fusion=f, **config), torch.float32) for f in (True, False))
    fused.core_attention.kernels = "triton"
    return fused, unfused


def assert_near(found, expected):
    for name, wanted in expected.items():
        torch.testing.assert_close(
            found[name], wanted, rtol=2e-4, atol=2e-5 * float(wanted.detach().abs().max()), msg=name
        )


@pytest.mark.parametrize("case", CASES)
def test_a_batch(case):
    fused, unfused = pair(**CASES[case])
    hidden = torch.randn(LENGTH, 2, 64)
    (found, indices), (expected, own) = step(fused, hidden), step(unfused, hidden)
    assert (indices is None and own is None) or torch.equal(indices, own)
    assert_near(found, expected)


@pytest.mark.parametrize("topk", [4, 64])
def test_packed_with_padding(topk):
    fused, unfused = pair(dsa_indexer_topk=topk, dsa_indexer_use_sparse_loss=True)
    packed = PackedSeqParams([0, 7, 7, 8, 13], cu_seqlens_q_padded=[0, 8, 8, 10, 15])
    hidden = torch.randn(17, 1, 64)
    hidden[[7, 9, 15, 16]] = torch.nan
    (found, indices), (expected, own) = (step(layer, hidden, packed_seq_params=packed) for layer in (fused, unfused))
    assert torch.equal(indices, own)
    assert_near(found, expected)


def test_shared_indices_and_no_tokens():
    fused, unfused = pair()
    hidden = torch.randn(LENGTH, 1, 64)
    indices = torch.arange(LENGTH)[None, :, None] - torch.tensor([0, 3, 1])  # some before the first key
    torch.testing.assert_close(
        fused(hidden, topk_indices=indices)[0], unfused(hidden, topk_indices=indices)[0], rtol=1e-4, atol=1e-4
    )
    assert fused(hidden[:0])[0].shape == (0, 1, 64)


def test_which_functions_serve_which_tensors():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert dsa_functions(cpu, torch.bfloat16) is reference
    assert dsa_functions(gpu, torch.bfloat16) is fusions
    assert dsa_functions(gpu, torch.float64) is reference
    assert dsa_functions(cpu, torch.float32, "triton") is fusions
    assert dsa_functions(gpu, torch.float32, "torch") is reference
