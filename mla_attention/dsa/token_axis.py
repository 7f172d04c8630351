"""The DSA functions on the layouts of a layer: they know one token axis, a layer has `[S, B]` or packed `[T]`.

A batch is walked sequence by sequence, on views without a copy, so a sequence's result never depends on its batch.
Packed tokens are one call, in which the offsets keep the sequences apart.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mla_attention.configs import MLAConfig
from mla_attention.dsa.indexer import Indexed
from mla_attention.token_layout import TokenLayout


@dataclass(frozen=True)
class TokenAxis:
    """Selection, attention and divergence over the rows of one forward.

    Args:
        functions: kernels or twins (`dsa_functions`).
        config: of the layer.
        softmax_scale: factor on q.k.
        tokens: layout of the query rows.
        positions: int64 `[rows]`, place of each query row on the key axis; None where they are the same rows.
        tp_group: ranks over which the heads are spread; the loss's target is summed over them.
    """

    functions: ModuleType
    config: MLAConfig
    softmax_scale: float
    tokens: TokenLayout
    positions: Tensor | None = None
    tp_group: ProcessGroup | None = None

    def indexer_topk(self, indexed: Indexed) -> Tensor:
        """Int64 `[B, rows, k]`: each row's highest-scoring keys."""
        with torch.no_grad(), _without_autocast(indexed.query.device):
            rows = [
                self.functions.indexer_topk(q, k, w, self.config.dsa_indexer_topk, **self._scoring())
                for q, k, w in self._sequences(*indexed)
            ]
        return _stack(rows, 0)

    def sparse_mla(self, query: Tensor, keys: Tensor, indices: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Latents `[.., n, Rkv]` of absorbed queries `[.., n, Rkv+Dr]` over keys `[keys, B, Rkv+Dr]` (packed
        `[keys, Rkv+Dr]`) at indices `[B, rows, k]`, and the log-sum-exp `[rows, n]` of each sequence."""
        with _without_autocast(query.device):
            results = [
                self.functions.sparse_mla(q, k, i, self.softmax_scale, self.config.kv_lora_rank)
                for (q, k), i in zip(self._sequences(query, keys), indices.unbind(0), strict=True)
            ]
        latents = [latent for latent, _ in results]
        return latents[0] if self.tokens.packed is not None else _stack(latents, 1), [lse for _, lse in results]

    def indexer_kl(
        self,
        indexed: Indexed,
        query: Tensor,
        keys: Tensor,
        indices: Tensor | None = None,
        lse: list[Tensor] | None = None,
    ) -> Tensor:
        """Divergence `[B, rows]` of each row over all keys that it may see, or over its `indices` with their `lse`."""
        if indexed.weights.numel() == 0:
            return indexed.weights.sum(-1).view(self.tokens.batch_size, self.tokens.rows)  # no row
        rows = []
        for b, (iq, ik, iw, q, k) in enumerate(self._sequences(*indexed, query, keys)):
            if indices is None:
                support = self._scoring()
            else:  # selected keys are visible ones
                support = {**self._scoring(), "cu_seqlens": None, "q_positions": None, "topk_indices": indices[b]}
                support["lse"] = None if lse is None else lse[b]
            support["tp_group"] = self.tp_group
            with _without_autocast(query.device):
                rows.append(self.functions.indexer_kl(iq, ik, iw, q, k, self.softmax_scale, **support))
        return _stack(rows, 0)

    def _scoring(self) -> dict:
        return {
            "relu": self.config.dsa_indexer_scoring_relu,
            "cu_seqlens": self.tokens.cu_seqlens,
            "q_positions": self.positions,
            "budget_bytes": self.config.dsa_score_budget_bytes,
        }

    def _sequences(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """The tensors of each token axis: of each sequence of a batch, or of all packed tokens."""
        if self.tokens.packed is not None:
            return [tensors]
        if self.tokens.batch_size == 1:
            return [tuple(t.squeeze(1) for t in tensors)]  # whose backward copies nothing, as that of unbind would
        return list(zip(*(t.unbind(1) for t in tensors), strict=True))


def _without_autocast(device: torch.device) -> AbstractContextManager:
    """Scores, softmax and divergence are fp32 at least, which autocast would take for a request to round."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _stack(rows: list[Tensor], dim: int) -> Tensor:
    """torch.stack, without a copy where there is one."""
    return rows[0].unsqueeze(dim) if len(rows) == 1 else torch.stack(rows, dim)
