"""torch.compile takes the whole sparse layer, kernels or twins, without a graph break."""

import pytest
import torch

from mla_attention import MLASelfAttention
from mla_attention.configs import tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="layers on the CPU, kernels in the interpreter")
LOSSES = {
    "sparse loss": {"dsa_indexer_use_sparse_loss": True},
    "dense loss": {},
    "warm-up": {"dsa_mode": "dense_warmup"},
}


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_graph_with_the_same_numbers(loss: str, kernels: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dims = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 32, "dsa_indexer_topk": 3, "dsa_indexer_loss_coeff": 1.0}
    layer = MLASelfAttention(tiny(experimental_attention_variant="dsa", **dims | LOSSES[loss]))
    layer.core_attention.kernels = kernels
    hidden = torch.randn(5, 1, layer.config.hidden_size, requires_grad=True)

    def run(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
        output, _, aux = module(hidden, return_aux=True)
        total = output.sum() + aux.indexer_loss
        return output, aux.indexer_loss, *torch.autograd.grad(total, [hidden, *layer.parameters()])

    expected = run(layer)
    found = run(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
