"""The layers that others wrote, built from our configuration and given our weights: what the benchmarks compare with.

Every loader imports its package lazily and raises where it is absent or refuses; callers record that as the row's
error. Transformer Engine must be imported after torch, which this module imports first.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Layer = Callable[[Tensor], Tensor]


def megatron_rope() -> ModuleType:
    """Return megatron-core's module of fused RoPE functions.

    Raises:
        ImportError: megatron-core is absent (or whatever its own import raises).
    """
    return importlib.import_module("megatron.core.fusions.fused_mla_yarn_rope_apply")


def _start_megatron() -> None:
    """Initialise one-process groups and the random state that megatron-core's layers ask for."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)


def megatron_config(config: Any, *, fused: bool, **more: Any) -> Any:
    """Return the MLATransformerConfig of the same layer in bf16; fused RoPE exists there for yarn only."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    yarn = config.rope_type == "yarn"
    # With factor 1 yarn is plain rope; megatron-core's softmax scale reads the factor whatever the type.
    return MLATransformerConfig(
        num_layers=1,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_head_dim,
        qk_pos_emb_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        rope_type="yarn" if yarn or fused else "rope",
        rotary_base=config.rotary_base,
        rotary_scaling_factor=config.rotary_scaling_factor if yarn else 1.0,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        apply_rope_fusion=fused,
        normalization="RMSNorm",
        qk_layernorm=True,
        layernorm_epsilon=config.layernorm_epsilon,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        **more,
    )


def megatron_layer(config: Any, weights: dict[str, Tensor], *, fused: bool) -> nn.Module:
    """Build megatron-core's MLASelfAttention with Transformer Engine on the current CUDA device.

    Args:
        config: our dense configuration.
        weights: Megatron names with the norms fused into the up projections.
        fused: its ``apply_rope_fusion``.

    Returns:
        The module; ``module(hidden [S, B, H], attention_mask=None, packed_seq_params=...) -> (output, bias)``.
    """
    importlib.import_module("transformer_engine.pytorch")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.spec_utils import build_module

    _start_megatron()
    spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, qk_layernorm=True)
    module = build_module(spec.submodules.self_attention, config=megatron_config(config, fused=fused), layer_number=1)
    return _with_weights(module, weights)


def megatron_dsa_layer(config: Any, weights: dict[str, Tensor]) -> nn.Module:
    """Build megatron-core's absorbed MLA with its own DSA (``dsa_kernel_backend="none"``), Transformer Engine linears.

    Args:
        config: our dsa configuration.
        weights: Megatron names, norms apart.

    Returns:
        The module; ``module(hidden [S, B, H], attention_mask=None) -> (output, bias)``.
    """
    importlib.import_module("transformer_engine.pytorch")
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.transformer.spec_utils import build_module

    _start_megatron()
    theirs = megatron_config(
        config,
        fused=False,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=config.dsa_indexer_n_heads,
        dsa_indexer_head_dim=config.dsa_indexer_head_dim,
        dsa_indexer_topk=config.dsa_indexer_topk,
        dsa_indexer_loss_coeff=config.dsa_indexer_loss_coeff,
        dsa_indexer_use_sparse_loss=config.dsa_indexer_use_sparse_loss,
        dsa_indexer_rope_interleaved=config.dsa_indexer_rope_interleaved,
        dsa_indexer_rotate_activation=False,
    )
    spec = get_dsa_module_spec_for_backend(theirs, TESpecProvider())
    return _with_weights(build_module(spec, config=theirs, layer_number=1), weights)


def _with_weights(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    module = module.cuda().to(torch.bfloat16)
    missing, unexpected = module.load_state_dict(weights, strict=False)
    missing = [key for key in missing if not key.endswith("_extra_state")]
    if missing or unexpected:
        raise RuntimeError(f"megatron-core weights do not fit: missing {missing}, unexpected {list(unexpected)}")
    return module


def megatron_packed(offsets: Tensor, longest: int) -> Any:
    """Return megatron-core's PackedSeqParams for thd."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def transformers_layer(
    config: Any, weights: dict[str, Tensor], length: int, dtype: torch.dtype, attention: str
) -> tuple[nn.Module, Layer]:
    """Build transformers' DeepseekV3Attention; it serves every dense shape here.

    Args:
        config: our dense configuration.
        weights: Hugging Face names.
        length: sequence length; its rotary tables are built here, outside of what is timed.
        dtype: dtype of weights and tables.
        attention: "sdpa" or "eager"; eager is given a causal mask, made outside of what is timed.

    Returns:
        The module, and a call ``hidden [S, B, H] -> output [S, B, H]``.
    """
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.rope_type == "yarn":
        rope = {
            "rope_type": "yarn",
            "rope_theta": config.rotary_base,
            "factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "mscale": config.mscale,
            "mscale_all_dim": config.mscale_all_dim,
        }
    theirs = DeepseekV3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_head_dim,
        qk_rope_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        num_hidden_layers=1,
        max_position_embeddings=max(length, int(rope.get("factor", 1.0) * config.original_max_position_embeddings)),
        rope_parameters=rope,
    )
    theirs._attn_implementation = attention
    device = next(iter(weights.values())).device
    module = DeepseekV3Attention(theirs, layer_idx=0).to(device=device, dtype=dtype)
    module.load_state_dict(weights)
    positions = torch.arange(length, device=device)[None]
    tables = DeepseekV3RotaryEmbedding(theirs).to(device)(torch.empty(1, device=device, dtype=dtype), positions)

    @functools.lru_cache(maxsize=1)
    def mask_of(rows: int) -> Tensor | None:
        if attention == "sdpa":
            return None
        lowest = torch.finfo(dtype).min
        return torch.full((1, 1, rows, rows), lowest, device=device, dtype=dtype).triu(1)

    def call(hidden: Tensor) -> Tensor:
        rows = hidden.shape[0]
        cut = tuple(table[:, :rows] for table in tables)
        states = {"hidden_states": hidden.transpose(0, 1), "position_embeddings": cut}
        return module(**states, attention_mask=mask_of(rows))[0].transpose(0, 1)

    return module, call
