"""MuonClip's qk-clip on the up-projections of a layer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mla_attention.argument_checks import check_kind, check_number
from mla_attention.configs import MLAConfig
from mla_attention.layers.torch_layers import Linear, local_tensor


def clip_projections(
    config: MLAConfig,
    q_up: Linear,
    kv_up: Linear,
    max_logits: Tensor,
    heads: int,
    threshold: float | None = None,
    alpha: float | None = None,
    tp_rank: int = 0,
) -> None:
    """Multiply each head's logits by eta = min(threshold / max_logit, 1), in place, without gradients.

    q nope rows *= eta^alpha, q rope rows *= eta, k rows *= eta^(1-alpha). The rope rows of the query take the whole of
    eta, since the rotary key is shared by all heads.

    Args:
        config: dims, and the defaults of threshold and alpha.
        q_up, kv_up: projections with rows per head [nope | rope] and [k | v].
        max_logits: fp `[n]`; heads whose entry is not finite are left alone.
        heads: n.
        threshold: largest logit wanted, > 0.
        alpha: share of eta that the query's nope rows take, in [0, 1].
        tp_rank: which heads of the layer these are; asked where the weights are DTensors that FSDP cut once more.

    Raises:
        ValueError: for a wrong shape, threshold or alpha.
    """
    threshold = config.qk_clip_threshold if threshold is None else threshold
    alpha = config.qk_clip_alpha if alpha is None else alpha
    check_kind("max_logits", max_logits, Tensor, required=True)
    if tuple(max_logits.shape) != (heads,) or max_logits.dtype == torch.bool or max_logits.is_complex():
        raise ValueError(
            f"max_logits: given {max_logits.dtype} {list(max_logits.shape)}, allowed are numbers "
            f"[{heads}], one for each head of this rank"
        )
    check_number("threshold", threshold, above=0)
    check_number("alpha", alpha, least=0, most=1)
    # A head with no logit above the threshold (also -inf, where it saw no token) is left alone, bit for bit; so is one
    # whose logits overflowed: eta = 0 or NaN would be the end of it.
    known = torch.where(max_logits.isfinite(), max_logits, threshold)
    eta = (threshold / known.clamp(min=threshold)).to(q_up.weight.device)[:, None]
    k_dim, rope_dim, v_dim = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
    q_factors = torch.cat([(eta**alpha).expand(heads, k_dim), eta.expand(heads, rope_dim)], dim=1)
    kv_factors = F.pad((eta ** (1 - alpha)).expand(heads, k_dim), (0, v_dim), value=1.0)
    _scale_rows(q_up.weight, q_factors.flatten(), tp_rank)
    _scale_rows(kv_up.weight, kv_factors.flatten(), tp_rank)


def _scale_rows(weight: Tensor, factors: Tensor, tp_rank: int) -> None:
    """Multiply each row of this rank's heads, or those of them that FSDP leaves to this rank, by its factor."""
    local, first = local_tensor(weight), 0
    if local.shape[0] != factors.shape[0]:
        first = cast(Any, weight).__create_chunk_list__()[0].offsets[0] - tp_rank * factors.shape[0]
    local.copy_(local * factors[first : first + local.shape[0], None])
