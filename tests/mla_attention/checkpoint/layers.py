"""Layers and checkpoints that the checkpoint tests share."""

import torch
from torch import Tensor, nn

from mla_attention import MLASelfAttention
from mla_attention.configs import MLAConfig, tiny

DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 8,
}
CONFIGS = {
    "compressed query": tiny(),
    "plain query": tiny(q_lora_rank=None),
    "bias": tiny(add_bias_linear=True),
    "fused down projections": tiny(mla_down_proj_fusion=True),
    "dsa": tiny(**DSA),
    "dsa with a shared indexer": tiny(**DSA, dsa_indexer_shared=True),
}
# Ours -> Hugging Face, written out by hand from transformers' attention classes.
NAMES = {
    "linear_q_proj.weight": "q_proj.weight",
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "kv_layernorm.weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
    "linear_proj.bias": "o_proj.bias",
    "core_attention.indexer.linear_wq_b.weight": "indexer.wq_b.weight",
    "core_attention.indexer.linear_wk.weight": "indexer.wk.weight",
    "core_attention.indexer.k_norm.weight": "indexer.k_norm.weight",
    "core_attention.indexer.k_norm.bias": "indexer.k_norm.bias",
    "core_attention.indexer.linear_weights_proj.weight": "indexer.weights_proj.weight",
}


def build(config: MLAConfig, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> MLASelfAttention:
    """Return a layer whose parameters are all random, norms and biases too."""
    layer = MLASelfAttention(config, dtype=dtype, device=device)
    if device != "meta":
        randomise(layer)
    return layer


def randomise(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the layer's state dict, to be compared later."""
    return {name: value.clone() for name, value in layer.state_dict().items()}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Return whether two state dicts have the same keys, dtypes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype is right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
