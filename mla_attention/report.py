"""What a layer costs, by counting: parameters, FLOPs and activation memory per token, cache, chosen back ends.

Everything is computed from the config; no layer is built and no memory taken.

FLOPs count two per multiply-add, forward only, without tensor parallelism; the backward of each product costs twice its
forward. A query of row i attends i+1 keys (dense), or min(i+1, K) (sparse), so that S rows have S(S+1)/2 or
sum_i min(i+1, K) pairs; figures per token are means over the rows of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_attention.attention import should_use_fused_mla_rope
from mla_attention.configs import MLAConfig
from mla_attention.core_attention import build_core_attention
from mla_attention.core_attention.choose import AutoAttention
from mla_attention.packed import PackedSeqParams
from mla_attention.rotary import YarnRotaryEmbedding, build_rotary, softmax_scale, yarn_correction_range
from mla_attention.token_layout import TokenLayout

__all__ = ["LayerReport", "layer_report"]


@dataclass(frozen=True)
class LayerReport:
    """Figures of one layer.

    Attributes:
        config: the layer.
        seq_len: S, tokens of the one sequence that the figures per token are means over.
        element_bytes: bytes of one activation or cache element (2: bf16).
        parameters: module name as in the state dict -> number of its parameters, weight and bias together.
        forward_flops: step -> FLOPs per token.
        activation_bytes: tensor kept for the backward -> bytes per token.
        latent_cache_bytes: bytes a token takes in a `LatentCache` (for dsa with its indexer key).
        full_cache_bytes: bytes a token would take as keys and values of all heads.
        softmax_scale: factor on q.k.
        rope: rotary setting -> value.
        backends: part of the layer -> what serves it.
    """

    config: MLAConfig
    seq_len: int
    element_bytes: int
    parameters: dict[str, int]
    forward_flops: dict[str, float]
    activation_bytes: dict[str, float]
    latent_cache_bytes: int
    full_cache_bytes: int
    softmax_scale: float
    rope: dict[str, object]
    backends: dict[str, str]

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_forward_flops(self) -> float:
        """FLOPs per token of one forward."""
        return sum(self.forward_flops.values())

    @property
    def total_activation_bytes(self) -> float:
        """Bytes per token kept for the backward."""
        return sum(self.activation_bytes.values())


def layer_report(
    config: MLAConfig, *, seq_len: int = 4096, element_bytes: int = 2, device: torch.device | str = "cpu"
) -> LayerReport:
    """Count what one layer costs.

    Args:
        config: the layer.
        seq_len: S, tokens of one sequence.
        element_bytes: bytes of an activation: 2 for bf16 and fp16, 4 for fp32.
        device: device that the back ends are chosen for; nothing is allocated there.

    Returns:
        The figures.

    Raises:
        ValueError: seq_len or element_bytes is not a positive int.
    """
    for name, value in (("seq_len", seq_len), ("element_bytes", element_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{name} must be a positive int, got {value!r}")
    return LayerReport(
        config=config,
        seq_len=seq_len,
        element_bytes=element_bytes,
        parameters=count_parameters(config),
        forward_flops=count_forward_flops(config, seq_len),
        activation_bytes=count_activation_bytes(config, seq_len, element_bytes),
        latent_cache_bytes=_latent_cache_width(config) * element_bytes,
        full_cache_bytes=config.num_attention_heads * (_qk_dim(config) + config.v_head_dim) * element_bytes,
        softmax_scale=softmax_scale(config),
        rope=describe_rope(config),
        backends=describe_backends(config, seq_len, torch.device(device)),
    )


def count_parameters(config: MLAConfig) -> dict[str, int]:
    """Parameters of each module of the layer, by its name in the state dict."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    rank, kv_rank, rope = config.q_lora_rank, config.kv_lora_rank, config.qk_pos_emb_head_dim
    counts: dict[str, int] = {}
    if rank is None:
        counts["linear_q_proj"] = hidden * heads * _qk_dim(config)
    else:
        counts["linear_q_down_proj"] = hidden * rank
        counts["q_layernorm"] = rank
        counts["linear_q_up_proj"] = rank * heads * _qk_dim(config)
    counts["linear_kv_down_proj"] = hidden * (kv_rank + rope)
    counts["kv_layernorm"] = kv_rank
    counts["linear_kv_up_proj"] = kv_rank * heads * (config.qk_head_dim + config.v_head_dim)
    counts["linear_proj"] = heads * config.v_head_dim * hidden + (hidden if config.add_bias_linear else 0)
    if _has_indexer(config):
        index_heads, index_dim, _ = _indexer_dims(config)
        counts["core_attention.indexer.linear_wq_b"] = (rank or 0) * index_heads * index_dim  # dsa has a query rank
        counts["core_attention.indexer.linear_wk"] = hidden * index_dim
        counts["core_attention.indexer.k_norm"] = 2 * index_dim
        counts["core_attention.indexer.linear_weights_proj"] = hidden * index_heads
    return counts


def count_forward_flops(config: MLAConfig, seq_len: int) -> dict[str, float]:
    """FLOPs per token of one forward over a sequence of seq_len tokens.

    projections:     2 * weights (the absorbed form multiplies by the halves of linear_kv_up_proj: the same number)
    core attention:  dense 2*N*(Dn+Dr+Dv) a pair; sparse, with more keys than K, 2*N*((Rkv+Dr)+Rkv) a pair
    indexer:         its projections, and scores of 2*Hi*Di a causal pair; nothing while it has no choice (S <= K)
    """
    parameters = count_parameters(config)
    heads, sparse = config.num_attention_heads, _attends_sparsely(config, seq_len)
    flops = {"projections": 2.0 * sum(count for name, count in parameters.items() if name.startswith("linear_"))}
    if config.add_bias_linear:  # handed to the caller, never added here
        flops["projections"] -= 2.0 * config.hidden_size
    causal_pairs = (seq_len + 1) / 2  # of one row, on average
    if sparse:
        kept = _mean_selected(seq_len, _indexer_dims(config)[2])
        flops["core attention"] = kept * 2 * heads * (2 * config.kv_lora_rank + config.qk_pos_emb_head_dim)
    else:
        flops["core attention"] = causal_pairs * 2 * heads * (_qk_dim(config) + config.v_head_dim)
    if _has_indexer(config) and (sparse or config.dsa_mode == "dense_warmup"):
        index_heads, index_dim, _ = _indexer_dims(config)
        flops["indexer projections"] = 2.0 * sum(
            count for name, count in parameters.items() if ".indexer.linear" in name
        )
        flops["indexer scores"] = causal_pairs * 2 * index_heads * index_dim
    return flops


def count_activation_bytes(config: MLAConfig, seq_len: int, element_bytes: int) -> dict[str, float]:
    """Bytes per token that one training forward keeps for its backward, by tensor, one copy of each.

    A lower bound: norms that are not fused keep a copy of their latents more, and 4 bytes a row.

    dense:  hidden H, latents before and after their norms 2*Rq + 2*Rkv + Dr, query and key N*(Dn+Dr), value N*Dv,
            output N*Dv, lse 4*N bytes; query, key and value are not kept with `recompute_up_proj`
    sparse: hidden and latents as above, query N*(Dn+Dr) before the absorption and N*(Rkv+Dr) after it, key Rkv+Dr,
            output latents N*Rkv, lse, indices 8*K bytes, output N*Dv; with a positive loss coefficient the indexer's
            q Hi*Di, k before and after its norm 2*Di, weights 4*Hi bytes
    """
    heads, kv_rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_pos_emb_head_dim
    qk_dim, sparse = _qk_dim(config), _attends_sparsely(config, seq_len)
    elements = {"hidden states": config.hidden_size, "latents": 2 * (config.q_lora_rank or 0) + 2 * kv_rank + rope}
    if sparse:
        elements["query before absorption"] = heads * qk_dim
        elements["absorbed query"] = heads * (kv_rank + rope)
        elements["latent key"] = kv_rank + rope
        elements["output latents"] = heads * kv_rank
    elif not config.recompute_up_proj:
        elements["query"] = heads * qk_dim
        elements["key"] = heads * qk_dim
        elements["value"] = heads * config.v_head_dim
    elements["output of the heads"] = heads * config.v_head_dim
    kept = {name: float(count * element_bytes) for name, count in elements.items()}
    kept["log-sum-exp (fp32)"] = 4.0 * heads
    if sparse:
        kept["selected indices (int64)"] = 8.0 * _indexer_dims(config)[2]
    if _has_indexer(config) and config.dsa_indexer_loss_coeff > 0:
        index_heads, index_dim, _ = _indexer_dims(config)
        kept["indexer"] = float((index_heads + 2) * index_dim * element_bytes + 4 * index_heads)
    return kept


def describe_rope(config: MLAConfig) -> dict[str, object]:
    """Rotary settings, and for YaRN the channel range of its ramp and the factor on the tables."""
    settings: dict[str, object] = {
        "type": config.rope_type,
        "channels": config.qk_pos_emb_head_dim,
        "base": f"{config.rotary_base:g}",
    }
    rotary = build_rotary(config)
    if isinstance(rotary, YarnRotaryEmbedding):
        low, high = yarn_correction_range(
            rotary.beta_fast,
            rotary.beta_slow,
            rotary.dim,
            rotary.base,
            rotary.original_max_position_embeddings,
            rotary.truncate,
        )
        settings.update(
            {
                "factor": rotary.factor,
                "original positions": rotary.original_max_position_embeddings,
                "beta fast, slow": f"{rotary.beta_fast:g}, {rotary.beta_slow:g}",
                "mscale, all dim": f"{rotary.mscale:g}, {rotary.mscale_all_dim:g}",
                "ramp": f"channels {low:g} to {high:g}",
                "table factor": round(rotary.amplitude, 6),
            }
        )
    if _has_indexer(config):
        settings["indexer pairs"] = "interleaved" if config.dsa_indexer_rope_interleaved else "half-split"
    return settings


def describe_backends(config: MLAConfig, seq_len: int, device: torch.device) -> dict[str, str]:
    """What serves each part of the layer on a device."""
    backends = {
        "rope": "fused Triton kernels" if should_use_fused_mla_rope(config) else "unfused torch",
        "key/value assembly": _describe_assembly(config, device),
        "core attention": _describe_core_attention(config, seq_len, device),
    }
    if config.experimental_attention_variant == "dsa":
        topk = _indexer_dims(config)[2]
        selection = "top-k indices of an earlier layer" if config.dsa_indexer_shared else "own indexer"
        backends["sparse attention"] = (
            f"absorbed, {topk} keys a query ({selection}); dense up to {topk} tokens"
            if config.dsa_mode == "sparse"
            else "none: dense attention while the indexer warms up"
        )
    return backends


def _describe_assembly(config: MLAConfig, device: torch.device) -> str:
    """The rule of key_value_assembly.py for a layer whose up-projection is a plain linear without hooks."""
    if config.kv_assembly != "auto":
        return config.kv_assembly
    return f"auto: {'gemm' if device.type == 'cuda' else 'split'} on {device.type}"


def _describe_core_attention(config: MLAConfig, seq_len: int, device: torch.device) -> str:
    core = build_core_attention(config, softmax_scale(config))
    if isinstance(core, AutoAttention):
        nothing = torch.empty(0)
        packed = PackedSeqParams(torch.tensor([0, seq_len], dtype=torch.int32))
        layouts = {"[S, B]": None, "packed": packed}
        chosen = [
            f"{core.choice(device, TokenLayout(1, seq_len, nothing, nothing, params))} ({layout})"
            for layout, params in layouts.items()
        ]
        return f"auto: {', '.join(chosen)} on {device.type}"
    reason = core.refusal(device, packed=False)
    return core.name if reason is None else f"{core.name}, which cannot run on {device.type}: {reason}"


def _qk_dim(config: MLAConfig) -> int:
    return config.qk_head_dim + config.qk_pos_emb_head_dim


def _has_indexer(config: MLAConfig) -> bool:
    return config.experimental_attention_variant == "dsa" and not config.dsa_indexer_shared


def _indexer_dims(config: MLAConfig) -> tuple[int, int, int]:
    """Hi, Di and K; zeros for a dense layer."""
    return config.dsa_indexer_n_heads or 0, config.dsa_indexer_head_dim or 0, config.dsa_indexer_topk or 0


def _attends_sparsely(config: MLAConfig, seq_len: int) -> bool:
    topk = _indexer_dims(config)[2]
    return config.experimental_attention_variant == "dsa" and config.dsa_mode == "sparse" and seq_len > topk


def _mean_selected(seq_len: int, topk: int) -> float:
    """Mean over rows i of min(i+1, K), for K < S."""
    return (topk * (topk + 1) / 2 + (seq_len - topk) * topk) / seq_len


def _latent_cache_width(config: MLAConfig) -> int:
    indexer_key = _indexer_dims(config)[1] if _has_indexer(config) else 0
    return config.kv_lora_rank + config.qk_pos_emb_head_dim + indexer_key
