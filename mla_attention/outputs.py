"""What a forward returns beside its output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionAux(NamedTuple):
    """Auxiliary results of one `MLASelfAttention.forward(..., return_aux=True)`.

    A tuple, so that whoever walks a module's outputs (FSDP's hooks, say) finds the loss in it.

    Attributes:
        indexer_loss: scalar, its coefficient applied, fp32; None where there is none to train on.
        topk_indices: int64 `[B, S, k]` (packed `[1, T, k]`), ascending key indices, -1 in unused trailing slots;
            None for dense attention and for the dense warm-up.
        max_attention_logits: fp32 `[n]`, the largest scaled q.k of each local head; None unless `config.qk_clip`,
            and with a cache, whose past queries are gone.
    """

    indexer_loss: Tensor | None = None
    topk_indices: Tensor | None = None
    max_attention_logits: Tensor | None = None
