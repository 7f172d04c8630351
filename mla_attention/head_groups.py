"""Half of the heads after the other half: the same attention, with a lower peak of memory in backward.

At its peak a training step holds query, key, value, output and the output's gradient of all heads, and on top of them
what the attention's backward is producing: dquery, dkey, dvalue, and the fp32 accumulator of dquery that cuDNN keeps.
The second part is as large as the first. Heads do not see each other, so they may as well run in two groups, each
through its own rows of the up projections: autograd then finishes the backward of one group, freeing what that group
had kept, before it starts the other, and the second part is halved.

The price is a copy of the contexts side by side (`output_projection.py`) and of the up projections' weight gradients,
and one addition of the latents' gradients, which are then sums of two rounded halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from mla_attention.layers.torch_layers import obstacle_to_bypassing, watcher
from mla_attention.token_layout import TokenLayout

if TYPE_CHECKING:
    from mla_attention.attention import MLASelfAttention

_LARGE_QUERY = 2**27  # bytes of a query from which half a step's gradients are worth some launches
_GROUPS = 2


def head_groups(layer: MLASelfAttention, q_latent: Tensor) -> int:
    """How many groups of heads a forward attends in: two for a large training step on a GPU, else one.

    Args:
        layer: the layer; its up and output projections must be plain ones that nobody watches, since they are bypassed.
        q_latent: `[.., Rq]`, one row for each query.
    """
    config = layer.config
    bypassed = (layer.query_up_proj, layer.linear_kv_up_proj, layer.linear_proj)
    width = layer.num_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    query_bytes = q_latent.shape[:-1].numel() * width * q_latent.element_size()
    if (
        not (q_latent.is_cuda and torch.is_grad_enabled())
        or torch.compiler.is_compiling()  # the compiler plans its own memory
        or config.recompute_up_proj
        or config.kv_assembly == "split"
        or config.core_attention_backend == "te"
        or layer.num_heads % _GROUPS
        or query_bytes < _LARGE_QUERY
        or any(obstacle_to_bypassing(linear) for linear in bypassed)
        or any(watcher(module) for module in layer.core_attention.modules())  # who would see it called twice
    ):
        return 1
    return _GROUPS


def attend_in_groups(
    layer: MLASelfAttention,
    core: Callable[[Tensor, Tensor, Tensor], Tensor],
    latents: tuple[Tensor, Tensor, Tensor],
    tokens: TokenLayout,
    groups: int,
) -> tuple[Tensor, ...]:
    """`core(query, key, value)` of each group of heads, `[.., n/groups, Dv]`.

    Args:
        layer: whose up projections and rotation are used.
        core: attention of some heads.
        latents: normed query and key/value latents and the shared rotary key, `[.., Rq]`, `[.., Rkv]`, `[.., Dr]`.
        tokens: layout of the query rows.
        groups: how many; they divide the heads.
    """
    q_latent, kv_latent, k_pe = latents
    heads = layer.num_heads // groups
    contexts = []
    for q_weight, kv_weight in zip(
        layer.query_up_proj.local_weight().chunk(groups),
        layer.linear_kv_up_proj.local_weight().chunk(groups),
        strict=True,
    ):
        query = F.linear(q_latent, q_weight)
        query = layer.rotate_query(query.unflatten(-1, (heads, query.shape[-1] // heads)), tokens)
        key, value = layer.assemble.up_project(kv_latent, k_pe, kv_weight, tokens.keys)
        contexts.append(core(query, key, value))
        del query, key, value  # only core attention's backward keeps them
    return tuple(contexts)
