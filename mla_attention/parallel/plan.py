"""Which parameters of an attention layer are cut by heads, and which layers see only a slice of the sequence."""

from __future__ import annotations

# Linear layers cut by heads, and the dimension of the weight that is cut.
HEAD_DIMS = {"linear_q_proj": 0, "linear_q_up_proj": 0, "linear_kv_up_proj": 0, "linear_proj": 1}

# Replicated layers that work on a rank's slice of the sequence under sequence parallelism. (The indexer's query comes
# from the gathered latent: every rank computes all of it.)
ON_SEQUENCE_SLICES = (
    "linear_q_down_proj",
    "q_layernorm",
    "linear_kv_down_proj",
    "kv_layernorm",
    "core_attention.indexer.linear_wk",
    "core_attention.indexer.k_norm",
    "core_attention.indexer.linear_weights_proj",
)
