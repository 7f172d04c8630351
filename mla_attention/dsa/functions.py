"""Which functions serve a DSA layer: the Triton kernels or their unfused twins, chosen here and nowhere else."""

from __future__ import annotations

from types import ModuleType

import torch

from mla_attention import fusions
from mla_attention.configs import MLAConfig
from mla_attention.fusions import reference

KERNELS = ("auto", "triton", "torch")

# Widest that the kernels hold in their tiles; any number up to it is right, a power of two or not.
KERNEL_LIMITS = {"kv_lora_rank": 1024, "qk_pos_emb_head_dim": 256, "dsa_indexer_head_dim": 1024}
LOSS_KERNEL_LIMITS = {"dsa_indexer_head_dim": 256, "dsa_indexer_n_heads": 256}


def dsa_functions(device: torch.device, dtype: torch.dtype, kernels: str = "auto") -> ModuleType:
    """The module whose `indexer_topk`, `sparse_mla` and `indexer_kl` serve tensors of this device and dtype.

    Args:
        device, dtype: of the tensors.
        kernels: "triton" or "torch" forces one; "auto" takes the kernels on a CUDA device except for fp64, which they
            refuse, and the twins elsewhere. (On a CPU the kernels run only in Triton's interpreter.)

    Raises:
        ValueError: if `kernels` is none of these.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels: given {kernels!r}, allowed are {', '.join(map(repr, KERNELS))}")
    if kernels == "auto":
        kernels = "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    return fusions if kernels == "triton" else reference


def check_kernel_limits(config: MLAConfig) -> None:
    """Refuse a layer that is wider than the kernels.

    Raises:
        ValueError: naming the field, its value and the largest allowed.
    """
    limits = KERNEL_LIMITS | (LOSS_KERNEL_LIMITS if config.dsa_indexer_loss_coeff > 0 else {})
    for name, largest in limits.items():
        if getattr(config, name) > largest:
            raise ValueError(
                f"{name}: given {getattr(config, name)}, allowed is at most {largest} for the DSA kernels "
                "(or core_attention.kernels='torch' on a layer built on the CPU)"
            )


def rope_functions(config: MLAConfig) -> ModuleType:
    """The module whose rotary functions serve a layer of this config."""
    return fusions if config.apply_rope_fusion else reference
