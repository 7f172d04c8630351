"""Hugging Face attention weights (deepseek_v2, deepseek_v3, deepseek_v32, kimi_k2, glm_moe_dsa) in and out of a module.

Every weight is a plain copy under another name (`parameters.TABLE`); rotary channels stay interleaved pairs.
"""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from mla_attention.argument_checks import check_kind
from mla_attention.attention import MLASelfAttention
from mla_attention.checkpoint.files import LazyTensor, open_tensors
from mla_attention.checkpoint.fp8 import FP8_DTYPE, SCALE_SUFFIX, BlockScaled, check_block_size, scale_shape
from mla_attention.checkpoint.parameters import (
    BY_HF,
    BY_OURS,
    Problems,
    Unusable,
    gather_full_tensors,
    load_full_tensors,
)

_IGNORED = frozenset({"rotary_emb.inv_freq"})
_FP8_DTYPES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)


def load_hf_state_dict(
    module: MLASelfAttention,
    tensors: Mapping[str, Tensor] | str | os.PathLike[str],
    prefix: str = "",
    *,
    block_size: tuple[int, int] = (128, 128),
) -> None:
    """Load one attention layer's weights from a Hugging Face checkpoint, strictly.

    Every key below `prefix` must be used exactly once and every parameter written; `rotary_emb.inv_freq` is ignored.
    FP8 weights with `<key>_scale_inv` are dequantised in fp32, w * scale per tile, and rounded once to the parameter's
    dtype. A rank that holds a shard (DTensor parameters, or a module built with `tp_group`) reads only its part. All is
    checked and read before anything is written: a failed load leaves the module unchanged.

    Args:
        module: `MLASelfAttention`, any back end, not on the meta device.
        tensors: Mapping of full tensors, or the path of a safetensors file, a folder of them, or an index of shards.
        prefix: What the layer's keys start with, e.g. `"model.layers.3.self_attn."`; other keys are not looked at.
        block_size: Rows and columns of an FP8 tile (`quantization_config.weight_block_size`).

    Raises:
        ValueError: one line naming every missing, unexpected or misshapen key, an FP8 weight without its scale, a scale
            without its FP8 weight, an unreadable checkpoint, or a module on the meta device.

    Source: weight names of transformers' DeepseekV2/V3/V32Attention and GlmMoeDsaAttention.
    """
    check_kind("module", module, MLASelfAttention, required=True)
    check_block_size(block_size)
    with open_tensors(tensors, prefix, _IGNORED.__contains__) as found:
        problems = Problems()
        renamed: dict[str, LazyTensor] = {}
        for key, tensor in found.items():
            name = _our_name(key)
            if name is not None:
                renamed[name] = _plain_or_scaled(key, tensor, found, block_size, prefix, problems)
            elif not _scales_fp8(key, found):
                problems.unexpected.append(prefix + key)
        load_full_tensors(module, renamed, problems, spell=lambda name: prefix + _hf_name(name))


def to_hf_state_dict(module: MLASelfAttention, prefix: str = "") -> dict[str, Tensor]:
    """Return the layer's full weights under their Hugging Face names; loading them back gives the same bits.

    Args:
        module: `MLASelfAttention`. With sharded parameters all ranks of the group must call this together.
        prefix: Put before every key.

    Returns:
        `{prefix + key: tensor}` in the parameters' dtype, detached, without `_extra_state`; a parameter that is not
        sharded shares its storage, as in `module.state_dict()`.

    Raises:
        ValueError: a parameter that no checkpoint knows.

    Source: as `load_hf_state_dict`.
    """
    check_kind("prefix", prefix, str, required=True)
    return {prefix + _hf_name(name): value for name, value in gather_full_tensors(module).items()}


def _our_name(key: str) -> str | None:
    """Return our name of a Hugging Face key, None for a key that the table does not know."""
    owner, _, leaf = key.rpartition(".")
    return f"{BY_HF[owner].ours}.{leaf}" if owner in BY_HF and not leaf.endswith(SCALE_SUFFIX) else None


def _hf_name(name: str) -> str:
    owner, _, leaf = name.rpartition(".")
    return f"{BY_OURS[owner].hf}.{leaf}"


def _scales_fp8(key: str, found: Mapping[str, LazyTensor]) -> bool:
    """Return whether the key is the scale of an FP8 weight that is there too, perhaps in another shard."""
    weight = found.get(key.removesuffix(SCALE_SUFFIX))
    return key.endswith(SCALE_SUFFIX) and weight is not None and weight.dtype in _FP8_DTYPES


def _plain_or_scaled(
    key: str,
    tensor: LazyTensor,
    found: Mapping[str, LazyTensor],
    block_size: tuple[int, int],
    prefix: str,
    problems: Problems,
) -> LazyTensor:
    """Return the tensor, joined with its scale when it is FP8; what is wrong with it goes into `problems`."""
    if tensor.dtype not in _FP8_DTYPES:
        return tensor
    scale = found.get(key + SCALE_SUFFIX)
    if tensor.dtype is not FP8_DTYPE or len(tensor.shape) != 2:
        problems.other.append(
            f"{prefix}{key} is {tensor.dtype} {list(tensor.shape)}, FP8 weights must be {FP8_DTYPE} matrices"
        )
    elif scale is None:
        problems.other.append(f"{prefix}{key} is {tensor.dtype} without its scale {prefix}{key}{SCALE_SUFFIX}")
    elif scale.shape != scale_shape(tensor.shape, block_size) or not scale.dtype.is_floating_point:
        expected = list(scale_shape(tensor.shape, block_size))
        problems.misshapen.append(
            f"{prefix}{key}{SCALE_SUFFIX} is {scale.dtype} {list(scale.shape)}, expected floating {expected}"
            f" (tiles of {block_size[0]}x{block_size[1]} of {list(tensor.shape)})"
        )
    else:
        return BlockScaled(tensor, scale, block_size)
    return Unusable()
