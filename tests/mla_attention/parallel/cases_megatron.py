"""Our layer as Megatron-LM builds it, over tensor- and sequence-parallel ranks, held to one rank's layer."""

import importlib.util
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mla_attention import MLASelfAttention
from mla_attention.configs import tiny
from mla_attention.integrations.megatron_layer import MegatronMLASelfAttention, mla_config
from mla_attention.parallel.plan import HEAD_DIMS
from tests.mla_attention.integrations import megatron_cpu
from tests.mla_attention.parallel.layouts import assert_close, step, world_group
from tests.mla_attention.parallel.ranks import case


def megatron_builds_a_share_of_the_layer(sequence_parallel: bool) -> None:
    """Output, input gradient and every parameter's gradient, without any reduction of Megatron's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    theirs = megatron_cpu.config_like(
        tiny(add_bias_linear=True), tensor_model_parallel_size=size, sequence_parallel=sequence_parallel
    )
    torch.manual_seed(0)
    reference = MLASelfAttention(mla_config(theirs))
    torch.manual_seed(0)  # each rank draws its share of the same weights
    layer = MegatronMLASelfAttention(theirs, pg_collection=SimpleNamespace(tp=world_group()))
    torch.manual_seed(1)
    hidden, gradient = (torch.randn(16, 2, theirs.hidden_size) for _ in range(2))
    output, hidden_gradient, _ = step(reference, hidden, gradient)

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(size)[rank] if sequence_parallel else t

    leaf = own(hidden).clone().requires_grad_()
    found, bias = layer(leaf)
    ((found + bias) * own(gradient)).sum().backward()
    assert_close(found.detach(), own(output), 1e-4, "output")
    assert leaf.grad is not None
    assert_close(leaf.grad, own(hidden_gradient), 1e-4, "input gradient")
    for name, parameter in reference.named_parameters():
        expected, dim = parameter.grad, HEAD_DIMS.get(name.removesuffix(".weight"))
        if dim is not None:
            expected = expected.chunk(size, dim)[rank]
        assert_close(layer.get_parameter(name).grad, expected, 1e-4, f"gradient of {name}")


if importlib.util.find_spec("megatron") is not None:

    @case(2, "megatron/tp")
    def tensor_parallel() -> None:
        megatron_builds_a_share_of_the_layer(False)

    @case(2, "megatron/tp_sp")
    def sequence_parallel() -> None:
        megatron_builds_a_share_of_the_layer(True)
