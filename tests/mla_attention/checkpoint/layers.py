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
