"""Megatron-LM attention weights in and out of a module, in each spelling that its versions wrote.

The module's own names are Megatron's. Besides them a checkpoint may hold the norms fused into the up projections, one
fused down projection, or the key and value up projections apart.
"""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from mla_attention.argument_checks import check_kind
from mla_attention.attention import MLASelfAttention
from mla_attention.checkpoint.files import Box, LazyTensor, open_tensors
from mla_attention.checkpoint.parameters import (
    FUSED_NORMS,
    Problems,
    Unusable,
    gather_full_tensors,
    load_full_tensors,
)
from mla_attention.configs import MLAConfig

_Q_DOWN, _KV_DOWN = "linear_q_down_proj.weight", "linear_kv_down_proj.weight"
_QKV_DOWN = "linear_qkv_down_proj.weight"  # rows: query latent, key/value latent, shared rotary key
_K_UP, _V_UP, _KV_UP = "linear_k_up_proj.weight", "linear_v_up_proj.weight", "linear_kv_up_proj.weight"


class RowRange:
    """Rows `start:stop` of another tensor."""

    def __init__(self, parent: LazyTensor, start: int, stop: int) -> None:
        self.parent = parent
        self.start = start
        self.shape = (stop - start, *parent.shape[1:])
        self.dtype = parent.dtype

    def read(self, box: Box) -> Tensor:
        """Return the box, counted from the first row of the range."""
        rows, rest = box[0], box[1:]
        return self.parent.read((slice(self.start + rows.start, self.start + rows.stop), *rest))


class MergedHeads:
    """Key rows `[N*Dn, R]` and value rows `[N*Dv, R]` read as one `[N*(Dn+Dv), R]`, key before value in each head."""

    def __init__(self, key: LazyTensor, value: LazyTensor, key_dim: int, value_dim: int) -> None:
        self.key, self.value = key, value
        self.key_dim, self.value_dim = key_dim, value_dim
        self.shape: tuple[int, ...] = (key.shape[0] + value.shape[0], key.shape[1])
        self.dtype = key.dtype

    def read(self, box: Box) -> Tensor:
        """Return the box, reading only the heads that it touches."""
        rows, columns = box
        per_head = self.key_dim + self.value_dim
        first, last = rows.start // per_head, -(-rows.stop // per_head)
        key = self.key.read((slice(first * self.key_dim, last * self.key_dim), columns))
        value = self.value.read((slice(first * self.value_dim, last * self.value_dim), columns))
        heads, width = last - first, columns.stop - columns.start
        parts = [key.reshape(heads, self.key_dim, width), value.reshape(heads, self.value_dim, width)]
        merged = torch.cat(parts, dim=1).flatten(0, 1)
        return merged[rows.start - first * per_head : rows.stop - first * per_head]


def load_megatron_state_dict(
    module: MLASelfAttention, tensors: Mapping[str, Tensor] | str | os.PathLike[str], prefix: str = ""
) -> None:
    """Load one attention layer's weights from a Megatron-LM state dict of full (gathered) tensors, strictly.

    Accepted besides the module's own keys: `linear_{q,kv}_up_proj.layer_norm_weight` for the norms,
    `linear_qkv_down_proj.weight` with rows [query latent, key/value latent, rotary key] for both down projections,
    `linear_k_up_proj.weight` with `linear_v_up_proj.weight` (merged per head). `_extra_state` and `inv_freq` keys are
    ignored. A rank that holds a shard takes its part; a failed load leaves the module unchanged.

    Args:
        module: `MLASelfAttention`, any back end, not on the meta device.
        tensors: Mapping of full tensors, or a safetensors path as in `load_hf_state_dict`.
        prefix: What the layer's keys start with, e.g. `"decoder.layers.3.self_attention."`.

    Raises:
        ValueError: one line naming every missing, unexpected or misshapen key, two spellings of one parameter, or a
            module on the meta device.

    Source: Megatron-LM `MLASelfAttention`, `FusedMLASelfAttention` and `AbsorbedMLASelfAttention` state dicts.
    """
    check_kind("module", module, MLASelfAttention, required=True)
    with open_tensors(tensors, prefix, _is_ignored) as found:
        problems = Problems()
        renamed, spelled = _unfused(found, module.config, prefix, problems)
        load_full_tensors(module, renamed, problems, spell=lambda name: prefix + spelled.get(name, name))


def to_megatron_state_dict(
    module: MLASelfAttention, prefix: str = "", *, fused_norm: bool = False
) -> dict[str, Tensor]:
    """Return the layer's full weights under Megatron-LM's names.

    Args:
        module: `MLASelfAttention`. With sharded parameters all ranks of the group must call this together.
        prefix: Put before every key.
        fused_norm: Name the latent norms `linear_{q,kv}_up_proj.layer_norm_weight`, as a Transformer Engine spec does,
            instead of `{q,kv}_layernorm.weight`.

    Returns:
        `{prefix + key: tensor}` in the parameters' dtype, detached, without `_extra_state`.

    Raises:
        ValueError: a parameter that no checkpoint knows.

    Source: as `load_megatron_state_dict`.
    """
    check_kind("prefix", prefix, str, required=True)
    fused = {plain: spelled for spelled, plain in FUSED_NORMS.items()} if fused_norm else {}
    return {prefix + fused.get(name, name): value for name, value in gather_full_tensors(module).items()}


def _is_ignored(key: str) -> bool:
    return key.rpartition(".")[2] in ("_extra_state", "inv_freq")


def _unfused(
    found: Mapping[str, LazyTensor], config: MLAConfig, prefix: str, problems: Problems
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the tensors under the module's unfused names, and each one's key in the checkpoint."""
    tensors: dict[str, LazyTensor] = {}
    spelled: dict[str, str] = {}

    def put(name: str, key: str, tensor: LazyTensor) -> None:
        if name in tensors:
            problems.other.append(f"{prefix}{spelled[name]} and {prefix}{key} both hold {name}")
        tensors[name], spelled[name] = tensor, key

    def fits(key: str, *expected: int) -> bool:
        if key not in found:
            problems.missing.append(prefix + key)
        elif found[key].shape != expected:
            problems.misshapen.append(f"{prefix}{key} is {list(found[key].shape)}, expected {list(expected)}")
        return key in found and found[key].shape == expected

    rank, latent = config.q_lora_rank, config.kv_lora_rank
    for key, tensor in found.items():
        if key == _QKV_DOWN and rank is not None:
            rows = rank + latent + config.qk_pos_emb_head_dim
            usable = fits(key, rows, config.hidden_size)
            put(_Q_DOWN, key, RowRange(tensor, 0, rank) if usable else Unusable())
            put(_KV_DOWN, key, RowRange(tensor, rank, rows) if usable else Unusable())
        elif key not in (_K_UP, _V_UP):
            put(FUSED_NORMS.get(key, key), key, tensor)
    if _K_UP in found or _V_UP in found:
        heads, key_dim, value_dim = config.num_attention_heads, config.qk_head_dim, config.v_head_dim
        usable = all([fits(_K_UP, heads * key_dim, latent), fits(_V_UP, heads * value_dim, latent)])
        merged = MergedHeads(found[_K_UP], found[_V_UP], key_dim, value_dim) if usable else Unusable()
        put(_KV_UP, _K_UP if _K_UP in found else _V_UP, merged)
    return tensors, spelled
