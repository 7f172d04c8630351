"""FLOPs and bytes that one attention layer must spend: the rooflines printed beside the measurements.

A multiply-add counts as two. Causal attention counts the lower triangle only; tensors count two bytes an element.
Dq = Dn + Dr; R = Rkv.

    GEMMs, forward              2 * T * (all weight elements); backward twice that
    dense attention, forward    L^2 * n * (Dq + Dv)            QK^T and PV on half of the square
    dense attention, backward   L^2 * n * (3*Dq + 2*Dv)        recomputed QK^T, dP, dQ, dK, dV
    sparse attention, forward   2 * pairs * n * ((R+Dr) + R)   pairs = sum over rows of the keys that they select
    sparse attention, backward  2 * pairs * n * (3*(R+Dr) + 2*R)
    indexer scores              2 * pairs * Hi * Di            pairs = causal pairs, T^2/2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ELEMENT = 2


def weight_elements(config: Any) -> dict[str, int]:
    """Return the number of elements of every weight matrix of a layer, by state-dict module name."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    query_width = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    weights: dict[str, int] = {}
    if config.q_lora_rank is None:
        weights["linear_q_proj"] = query_width * hidden
    else:
        weights["linear_q_down_proj"] = config.q_lora_rank * hidden
        weights["linear_q_up_proj"] = query_width * config.q_lora_rank
    weights["linear_kv_down_proj"] = (config.kv_lora_rank + config.qk_pos_emb_head_dim) * hidden
    weights["linear_kv_up_proj"] = heads * (config.qk_head_dim + config.v_head_dim) * config.kv_lora_rank
    weights["linear_proj"] = hidden * heads * config.v_head_dim
    return weights


def indexer_elements(config: Any) -> int:
    """Return the number of weight elements of the indexer's projections."""
    width = config.dsa_indexer_n_heads * config.dsa_indexer_head_dim
    return width * config.q_lora_rank + (config.dsa_indexer_head_dim + config.dsa_indexer_n_heads) * config.hidden_size


def gemm_flops(config: Any, tokens: int) -> int:
    """Return the FLOPs of a dense layer's projections in one forward; a backward costs twice as many."""
    return 2 * tokens * sum(weight_elements(config).values())


def attention_flops(config: Any, lengths: Sequence[int]) -> tuple[int, int]:
    """Return the (forward, backward) FLOPs of causal attention over sequences of these lengths."""
    squares = sum(length * length for length in lengths) * config.num_attention_heads
    key_dim, value_dim = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    return squares * (key_dim + value_dim), squares * (3 * key_dim + 2 * value_dim)


def lower_bound_bytes(config: Any, tokens: int) -> int:
    """Return the bytes of query, key, value, output and their gradients: what no unfused backward can do without."""
    per_head = 2 * (config.qk_head_dim + config.qk_pos_emb_head_dim) + 2 * config.v_head_dim
    return 2 * ELEMENT * tokens * config.num_attention_heads * per_head


def selected_pairs(tokens: int, topk: int) -> int:
    """Return how many (query, key) pairs a causal top-k selects: sum over rows of min(row + 1, topk)."""
    full = max(0, tokens - topk)
    ramp = min(tokens, topk)
    return full * topk + ramp * (ramp + 1) // 2


def causal_pairs(queries: int, keys: int) -> int:
    """Return the allowed pairs of the last ``queries`` rows of a causal sequence of ``keys`` tokens."""
    first = keys - queries
    return queries * first + queries * (queries + 1) // 2


def sparse_mla_flops(pairs: int, heads: int, kv_rank: int, rope_dim: int) -> tuple[int, int]:
    """Return the (forward, backward) FLOPs of absorbed sparse attention over ``pairs`` selected pairs."""
    width = kv_rank + rope_dim
    return 2 * pairs * heads * (width + kv_rank), 2 * pairs * heads * (3 * width + 2 * kv_rank)


def indexer_flops(pairs: int, heads: int, width: int) -> int:
    """Return the FLOPs of the indexer's scores over ``pairs`` pairs."""
    return 2 * pairs * heads * width


def indexer_kl_flops(pairs: int, index_heads: int, index_width: int, heads: int, width: int) -> tuple[int, int]:
    """Return the (forward, backward) FLOPs of the indexer's KL over ``pairs`` support pairs.

    Forward: attention logits for the target and index scores. Backward: scores again, then their two products.
    """
    scores = indexer_flops(pairs, index_heads, index_width)
    return scores + 2 * pairs * heads * width, 3 * scores


def dsa_layer_flops(config: Any, tokens: int) -> int:
    """Return the FLOPs of one training step of a dsa layer with the sparse loss, one sequence.

    Projections three times; the absorbed key and value up-projections act per token like the dense ones; indexer scores
    once over all causal pairs (selection), sparse attention forward and backward, KL forward and backward.
    """
    pairs = selected_pairs(tokens, config.dsa_indexer_topk)
    index = (config.dsa_indexer_n_heads, config.dsa_indexer_head_dim)
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    heads = config.num_attention_heads
    projections = 3 * (gemm_flops(config, tokens) + 2 * tokens * indexer_elements(config))
    sparse = sum(sparse_mla_flops(pairs, heads, config.kv_lora_rank, config.qk_pos_emb_head_dim))
    loss = sum(indexer_kl_flops(pairs, *index, heads, width)) if config.dsa_indexer_loss_coeff > 0 else 0
    return projections + indexer_flops(causal_pairs(tokens, tokens), *index) + sparse + loss


def dense_layer_flops(config: Any, lengths: Sequence[int]) -> int:
    """Return the FLOPs of one training step of a dense layer over sequences of these lengths."""
    return 3 * gemm_flops(config, sum(lengths)) + sum(attention_flops(config, lengths))
