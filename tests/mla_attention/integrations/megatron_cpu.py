"""megatron-core's layers on the CPU: one gloo rank, fp32, and the modules that its CPU specs lack."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mla_attention.configs import MLAConfig

# Fields that Megatron's config does not have, or that are given below.
_NOT_SHARED = (
    *("num_layers", "rope_truncate", "rope_attention_factor", "core_attention_backend", "kv_assembly"),
    *("recompute_up_proj", "qk_clip", "qk_clip_threshold", "qk_clip_alpha", "attention_dropout", "softmax_scale"),
)


@contextmanager
def started() -> Iterator[None]:
    """Megatron's groups over this process alone. Its rotary embeddings ask for a current CUDA device: the CPU."""
    from megatron.core import parallel_state

    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        torch.cuda.current_device = current


class PlainLinear(nn.Linear):
    """A linear layer with the constructor and the answer of Megatron's."""

    def __init__(self, in_features, out_features, *, bias=False, **ignored):
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x):
        return super().forward(x), None


class PlainLayerNorm(nn.LayerNorm):
    """A layer norm with the constructor of Megatron's."""

    def __init__(self, config, hidden_size, eps, **ignored):
        super().__init__(hidden_size, eps=eps)


class PlainAttention(nn.Module):
    """Causal softmax attention; the local spec's DotProductAttention takes no channels of its own for values."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **ignored):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **ignored):
        logits = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(-2)


def config_like(config: MLAConfig, **more):
    """Megatron's config of the same layer in fp32."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    shared = [name for name in vars(config) if name not in _NOT_SHARED and not name.startswith("dsa_")]
    if config.experimental_attention_variant == "dsa":
        shared += [name for name in vars(config) if name.startswith("dsa_indexer") and name != "dsa_indexer_shared"]
    return MLATransformerConfig(
        num_layers=1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        transformer_impl="local",
        **{name: getattr(config, name) for name in shared},
        **more,
    )


def dense_layer(config: MLAConfig) -> nn.Module:
    """megatron-core's MLASelfAttention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    attention = spec.submodules.self_attention
    attention.submodules.core_attention = PlainAttention
    return build_module(attention, config=config_like(config), layer_number=1)


def sparse_layer(config: MLAConfig) -> nn.Module:
    """megatron-core's AbsorbedMLASelfAttention with DSAttention and its indexer."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.spec_utils import build_module

    backend = LocalSpecProvider()
    backend.linear = lambda: ColumnParallelLinear
    theirs = config_like(config)
    spec = get_dsa_module_spec_for_backend(theirs, backend)
    indexer = spec.submodules.core_attention.submodules.indexer.submodules
    indexer.linear_wq_b = indexer.linear_wk = indexer.linear_weights_proj = PlainLinear
    indexer.k_norm = PlainLayerNorm
    return build_module(spec, config=theirs, layer_number=1)


def gradients(layer: nn.Module, hidden: Tensor, direction: Tensor, **arguments) -> dict[str, Tensor | None]:
    """Output, and the gradients of the input and of every parameter."""
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden, attention_mask=None, **arguments)[0]
    parameters = dict(layer.named_parameters())
    found = torch.autograd.grad(output, [hidden, *parameters.values()], direction, allow_unused=True)
    return dict(zip(["output", "hidden", *parameters], [output.detach(), *found], strict=True))
