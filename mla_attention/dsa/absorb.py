"""The absorbed form of MLA: attention over latents instead of over keys and values.

    q_nope . (k_up @ latent) = (q_nope @ k_up) . latent        so the key up-projection moves to the query,
    sum_t p_t (v_up @ latent_t) = v_up @ (sum_t p_t latent_t)  and the value up-projection to the output.

k_up `[n, Dn, Rkv]` and v_up `[n, Dv, Rkv]` are views of the weight of `linear_kv_up_proj`, whose rows are per head
[Dn key rows | Dv value rows].

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE_BYTES = 2**28  # logits that latent_attention holds at once


def split_up_projection(weight: Tensor, qk_head_dim: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """(k_up `[n, Dn, Rkv]`, v_up `[n, Dv, Rkv]`), views of the up-projection's weight `[n*(Dn+Dv), Rkv]`."""
    per_head = weight.view(-1, qk_head_dim + v_head_dim, weight.shape[-1])
    return per_head[:, :qk_head_dim], per_head[:, qk_head_dim:]


def absorb_query(q_nope: Tensor, k_up: Tensor) -> Tensor:
    """q_nope `[.., n, Dn]` @ k_up `[n, Dn, Rkv]` -> `[.., n, Rkv]`."""
    return torch.einsum("...nd,ndr->...nr", q_nope, k_up)


def up_project_value(latent: Tensor, v_up: Tensor) -> Tensor:
    """Attention output in latents `[.., n, Rkv]` -> `[.., n, Dv]`."""
    return torch.einsum("...nr,nvr->...nv", latent, v_up)


def latent_attention(query: Tensor, keys: Tensor, first_position: int, scale: float, kv_rank: int) -> Tensor:
    """Causal attention of new tokens over cached latents, query rows tiled so that the logits stay within 256 MiB.

    Args:
        query: absorbed `[S, B, n, Rkv+Dr]`.
        keys: `[L, B, Rkv+Dr]`, the new tokens' own keys last.
        first_position: index among the keys of the first query's own token.
        scale: factor on q.k.
        kv_rank: Rkv.

    Returns:
        Latents `[S, B, n, Rkv]`, softmax in fp32 at least.
    """
    rows, batch, heads = query.shape[:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = keys.to(wide)
    position = torch.arange(first_position, first_position + rows, device=query.device)
    future = torch.arange(keys.shape[0], device=query.device) > position[:, None]  # [S, L]
    tile = max(1, _TILE_BYTES // max(1, batch * heads * keys.shape[0] * wide.itemsize))
    outputs = []
    for q, m in zip(query.split(tile), future.split(tile), strict=True):
        logits = torch.einsum("sbnd,tbd->bnst", q.to(wide), keys) * scale
        weights = logits.masked_fill(m, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("bnst,tbr->sbnr", weights, keys[..., :kv_rank]).to(query.dtype))
    return torch.cat(outputs) if outputs else query[..., :kv_rank]
