"""Sparse attention: each query attends to the K keys that the indexer scores highest.

    T <= K:  every key would be selected, so the layer attends densely, exactly as a dense layer does
    T >  K:  indices = topk(indexer scores);  o = softmax over the indices of [q_nope k_up | q_pe] . [latent | k_pe]

`dsa_mode="dense_warmup"` always attends densely and trains the indexer alone; the hand-over to "sparse" is one change
of the config, the parameters are the same.

What backward keeps of the absorbed form: query `[.., n, Rkv+Dr]`, key, output latents, indices, and for the loss the
indexer's query, key and weights. With `config.recompute_up_proj` query and key are computed again instead.

Source: DeepSeek-V3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mla_attention.communication import Communication
from mla_attention.configs import MLAConfig
from mla_attention.core_attention import CoreAttention
from mla_attention.dsa.absorb import latent_attention
from mla_attention.dsa.functions import check_kernel_limits, dsa_functions
from mla_attention.dsa.indexer import Indexed, Indexer
from mla_attention.dsa.loss import attach_loss, indexer_loss
from mla_attention.dsa.selection import (
    all_visible,
    check_index_values,
    check_topk_indices,
    only_visible,
    query_positions,
    visible_keys,
    with_width,
)
from mla_attention.dsa.token_axis import TokenAxis
from mla_attention.latent_cache import LatentCache
from mla_attention.layers.torch_layers import TorchLayers
from mla_attention.outputs import AttentionAux
from mla_attention.token_layout import TokenLayout

Expanded = Callable[[Callable[[Tensor, Tensor, Tensor], Tensor]], Tensor]
Absorbed = Callable[[Callable[[Tensor, Tensor], Tensor]], Tensor]


class SparseAttention(nn.Module):
    """Indexer, selection, and attention over the selected keys.

    Args:
        config: of the layer.
        softmax_scale: factor on q.k.
        dense: core attention for where every key is attended to.
        layers: builder of the indexer's layers.

    Attributes:
        kernels: "auto", or "triton" or "torch" to force the kernels or their unfused twins (see `dsa_functions`).
        attached_loss_scale: gradient that an attached indexer loss is given: 1, or 1/microbatches where the caller
            accumulates gradients, times the loss scale of fp16 training.
    """

    def __init__(self, config: MLAConfig, softmax_scale: float, *, dense: CoreAttention, layers: TorchLayers) -> None:
        super().__init__()
        if config.dsa_indexer_topk is None:
            raise ValueError("config: given a dense one, allowed is experimental_attention_variant='dsa'")
        self.config = config
        self.topk = config.dsa_indexer_topk
        self.softmax_scale = softmax_scale
        self.dense = dense
        self.indexer = None if config.dsa_indexer_shared else Indexer(config, layers)
        self.kernels = "auto"
        self.attached_loss_scale = 1.0

    def check(self, device: torch.device, *, packed: bool, cp_size: int = 1) -> None:
        """Refuse widths that the kernels lack, and a forced core attention that cannot serve the dense case.

        Raises:
            ValueError: naming the field or the back end, what was given and what is allowed.
        """
        if device.type == "cuda" and self.kernels != "torch":
            check_kernel_limits(self.config)
        self.dense.check(device, packed=packed, cp_size=cp_size)

    def forward(
        self,
        hidden: Tensor,
        q_latent: Tensor,
        tokens: TokenLayout,
        *,
        expanded: Expanded,
        absorbed: Absorbed,
        absorb: Callable[[], tuple[Tensor, Tensor]],
        comm: Communication,
        topk_indices: Tensor | None = None,
        cache: LatentCache | None = None,
        return_aux: bool = False,
    ) -> tuple[Tensor, AttentionAux]:
        """Context of each token, the indices attended to and the indexer's loss.

        Args:
            hidden: `[S, B, H]`, packed `[T, H]`, zero in rows without a token.
            q_latent: normed query latent `[S, B, Rq]`, packed `[T, Rq]`.
            tokens: layout of the rows.
            expanded: context from a function of query, key and value.
            absorbed: context from a function of absorbed query `[.., n, Rkv+Dr]` and key `[.., 1, Rkv+Dr]` that
                answers with latents `[.., n, Rkv]`.
            absorb: absorbed query and key alone.
            comm: gathers the indexer's keys over context-parallel ranks, and what it makes of a slice of the sequence
                over tensor-parallel ranks; sums the loss and its target.
            topk_indices: keys to attend to, `[B, S, k]`, packed `[1, T, k]`; the indexer is then not asked. Keys that
                a query may not see take no part.
            cache: past tokens; there is no indexer loss with a cache.
            return_aux: report the loss instead of attaching it, and the indices.

        Returns:
            (context `[.., n, Dv]`, aux)

        Raises:
            ValueError: for topk_indices that are missing, ill-shaped, or given to a dense warm-up.
        """
        first = 0 if cache is None else cache.length
        axis = TokenAxis(
            dsa_functions(hidden.device, q_latent.dtype, self.kernels),
            self.config,
            self.softmax_scale,
            tokens,
            query_positions(tokens, first, hidden.device),
            comm.tp_group,
        )
        given = self._given_indices(topk_indices, axis, first + tokens.key_rows)
        trains = given is None and cache is None and self._trains(return_aux)
        run = _Run(axis, first + tokens.longest, cache, given, trains)
        dense = self._attends_densely(run)
        if trains or cache is not None or not (dense or given is not None):
            run.indexed = self._ask_indexer(hidden, q_latent, run, comm)
        if not dense:
            context = absorbed(lambda query, key: self._attend_selected(query, key, run))
        elif first:
            context = absorbed(lambda query, key: self._attend_cache(query, key, run))
        else:
            context = expanded(lambda query, key, value: self.dense(query, key, value, tokens))
            if trains or cache is not None:
                with torch.no_grad():
                    query, key = absorb()
                self._note_all(query, key, run)
        if dense and return_aux and given is None and self.config.dsa_mode == "sparse":
            run.indices = all_visible(run.visible(), min(self.topk, run.longest), tokens.batch_size)

        loss = None if run.divergence is None else indexer_loss(run.divergence, tokens, self.config, comm)
        if loss is not None and not return_aux:
            context = attach_loss(context, loss, self.attached_loss_scale)
        return context, AttentionAux(indexer_loss=loss, topk_indices=run.indices)

    def _given_indices(self, topk_indices: Tensor | None, axis: TokenAxis, num_keys: int) -> Tensor | None:
        """A caller's indices as int64, without keys that their query may not see."""
        config = self.config
        if config.dsa_mode == "dense_warmup":
            if topk_indices is not None:
                raise ValueError("topk_indices: given to a layer with dsa_mode='dense_warmup', allowed is None")
            return None
        if topk_indices is None:
            if config.dsa_indexer_shared:
                raise ValueError(
                    "topk_indices: given None to a layer with dsa_indexer_shared=True, "
                    "allowed are the aux.topk_indices of an earlier layer"
                )
            return None
        check_topk_indices(topk_indices, axis.tokens)
        visible = visible_keys(axis.tokens, num_keys, axis.positions, topk_indices.device)
        check_index_values(topk_indices, visible, num_keys)
        return only_visible(topk_indices, visible)

    def _trains(self, return_aux: bool) -> bool:
        """Whether the indexer's loss is wanted: asked for, or of use to a backward."""
        if self.indexer is None or not self.training or self.config.dsa_indexer_loss_coeff == 0:
            return False
        return return_aux or (torch.is_grad_enabled() and any(p.requires_grad for p in self.indexer.parameters()))

    def _attends_densely(self, run: _Run) -> bool:
        tokens = run.axis.tokens
        if tokens.rows * tokens.batch_size == 0 or self.config.dsa_mode == "dense_warmup":
            return True
        return run.indices is None and run.longest <= self.topk

    def _ask_indexer(self, hidden: Tensor, q_latent: Tensor, run: _Run, comm: Communication) -> Indexed | None:
        """Queries and weights of the rows and keys of all tokens; with a graph only where there is a loss."""
        if self.indexer is None:
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and run.trains):
            indexed = self.indexer(hidden, q_latent, run.axis.tokens, comm)
            (every_key,) = comm.to_all_keys(indexed.key, order=run.axis.tokens.order)
            return indexed._replace(key=every_key)

    def _attend_selected(self, query: Tensor, key: Tensor, run: _Run) -> Tensor:
        """Output latents over the given indices, or the indexer's."""
        keys, indexed = run.with_past(key)
        if indexed is not None and run.indices is None:
            run.indices = self._select(indexed, run)
        indices = cast(Tensor, run.indices)  # without an indexer they are given
        latents, lse = run.axis.sparse_mla(query, keys, indices)
        if indexed is not None and run.trains:
            support = (indices, lse) if self.config.dsa_indexer_use_sparse_loss else ()
            run.divergence = run.axis.indexer_kl(indexed, query, keys, *support)
        return latents

    def _select(self, indexed: Indexed, run: _Run) -> Tensor:
        """The indexer's keys, int64 `[B, rows, K]`; none for rows without a token."""
        indices = with_width(run.axis.indexer_topk(indexed), min(self.topk, run.longest))
        keep = run.axis.tokens.token_rows()
        return indices if keep is None else indices.masked_fill(~keep[:, None], -1)

    def _attend_cache(self, query: Tensor, key: Tensor, run: _Run) -> Tensor:
        """Output latents over all keys of the cache, the new ones included."""
        keys, _ = run.with_past(key)
        first = keys.shape[0] - key.shape[0]
        return latent_attention(query, keys, first, self.softmax_scale, self.config.kv_lora_rank)

    def _note_all(self, query: Tensor, key: Tensor, run: _Run) -> None:
        """What the absorbed form of a dense step is needed for: the cache, and the loss over all keys."""
        keys, indexed = run.with_past(key)
        if indexed is not None and run.trains:
            run.divergence = run.axis.indexer_kl(indexed, query, keys)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"mode={config.dsa_mode}, topk={self.topk}, indexer_loss_coeff={config.dsa_indexer_loss_coeff}, "
            f"sparse_loss={config.dsa_indexer_use_sparse_loss}, kernels={self.kernels}"
        )


@dataclass
class _Run:
    """One forward: what it is given, and what it finds on the way."""

    axis: TokenAxis
    longest: int  # most keys that a query can see
    cache: LatentCache | None
    indices: Tensor | None  # int64 [B, rows, k]: given, later selected
    trains: bool
    indexed: Indexed | None = None
    divergence: Tensor | None = None  # [B, rows]

    def with_past(self, key: Tensor) -> tuple[Tensor, Indexed | None]:
        """All keys `[keys, .., Rkv+Dr]` and the indexer's, the new ones last; those are appended to the cache."""
        keys, indexed, cache = key.squeeze(-2), self.indexed, self.cache
        if cache is None:
            return keys, indexed
        cache.append(keys, None if indexed is None else indexed.key)
        if cache.length == keys.shape[0]:
            return keys, indexed
        past, index_keys = cache.entries()
        keys = past.to(keys.dtype)
        if indexed is None or index_keys is None:
            return keys, None
        return keys, indexed._replace(key=index_keys.to(indexed.key.dtype))

    def visible(self) -> tuple[Tensor, Tensor]:
        tokens = self.axis.tokens
        num_keys = tokens.key_rows if self.cache is None else self.cache.length
        return visible_keys(tokens, num_keys, self.axis.positions, tokens.cos.device)
