"""Host checks of the indexer's scores and selection: what is refused before any launch, by kernels and twins alike.

Checks of shapes and dtypes cost nothing. Checks of values need a device sync, so they run only under
MLA_ATTENTION_VALIDATE=1.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..host_checks import check_tensor
from .attention_checks import check_budget, check_float, check_same_device, values_are_checked

_INTEGERS = (torch.int32, torch.int64)
_LARGEST_KERNEL_WIDTH = 1024


def check_indexer_inputs(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    cu_seqlens: Tensor | None,
    q_positions: Tensor | None,
    budget_bytes: int,
    *,
    allow_double: bool,
) -> None:
    """Refuse queries [T, Hi, Di], keys [S, Di], weights [T, Hi], offsets or positions that do not fit together."""
    check_float("index_q", index_q, 3, allow_double=allow_double)
    check_float("index_k", index_k, 2, allow_double=allow_double)
    check_float("index_weights", index_weights, 2, allow_double=allow_double)
    rows, heads, width = index_q.shape
    keys = index_k.shape[0]
    if heads < 1 or width < 1:
        raise ValueError(f"index_q must have at least one head and one channel, got shape {tuple(index_q.shape)}")
    if index_k.shape[1] != width:
        raise ValueError(f"index_k must be [S, {width}] like index_q's last width, got {tuple(index_k.shape)}")
    if index_k.dtype != index_q.dtype:
        raise ValueError(f"index_k must have index_q's dtype {index_q.dtype}, got {index_k.dtype}")
    if tuple(index_weights.shape) != (rows, heads):
        raise ValueError(f"index_weights must be [T, Hi] = {(rows, heads)}, got {tuple(index_weights.shape)}")
    check_same_device("index_k", index_k, "index_q", index_q)
    check_same_device("index_weights", index_weights, "index_q", index_q)
    if keys >= 2**31:
        raise ValueError(f"index_k must have fewer than 2**31 rows, got {keys}")
    check_budget(budget_bytes)
    _check_sequences(index_q, keys, cu_seqlens, q_positions)


def _check_sequences(index_q: Tensor, keys: int, cu_seqlens: Tensor | None, q_positions: Tensor | None) -> None:
    rows = index_q.shape[0]
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in _INTEGERS:
            raise ValueError(
                f"cu_seqlens must be int32 or int64 [sequences + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            )
        check_same_device("cu_seqlens", cu_seqlens, "index_q", index_q)
        if q_positions is None and rows != keys:
            raise ValueError(
                f"cu_seqlens without q_positions needs as many keys as rows, got {rows} rows and {keys} keys"
            )
    if q_positions is not None:
        check_tensor("q_positions", q_positions)
        if tuple(q_positions.shape) != (rows,) or q_positions.dtype not in _INTEGERS:
            raise ValueError(
                f"q_positions must be int32 or int64 [T={rows}], got {q_positions.dtype} {tuple(q_positions.shape)}"
            )
        check_same_device("q_positions", q_positions, "index_q", index_q)
    if not values_are_checked():
        return
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or any(b < a for a, b in pairwise(offsets)) or offsets[-1] > keys:
            raise ValueError(f"cu_seqlens must rise from 0 to at most {keys} keys, got {offsets}")
    if q_positions is not None and rows and int(q_positions.max()) >= keys:
        raise ValueError(f"q_positions must be below the {keys} keys, got {int(q_positions.max())}")


def check_kernel_width(index_q: Tensor) -> None:
    """Refuse indexer heads wider than a kernel's tile."""
    if index_q.shape[2] > _LARGEST_KERNEL_WIDTH:
        raise ValueError(
            f"index_q's width must be at most {_LARGEST_KERNEL_WIDTH} for the kernel, got {index_q.shape[2]}"
        )


def check_scores(scores: Tensor, *, allow_double: bool) -> None:
    """Refuse scores that are no fp32 [T, S] matrix (fp64 too where the twin computes it)."""
    allowed = (torch.float32, torch.float64) if allow_double else (torch.float32,)
    check_tensor("scores", scores)
    if scores.dim() != 2:
        raise ValueError(f"scores must have 2 dimensions, got shape {tuple(scores.shape)}")
    if scores.dtype not in allowed:
        raise ValueError(f"scores must be one of {', '.join(map(str, allowed))}, got {scores.dtype}")
    if scores.shape[1] >= 2**31:
        raise ValueError(f"scores must have fewer than 2**31 keys, got {scores.shape[1]}")


def check_topk(topk: int) -> None:
    """Refuse a number of selected keys that is no positive integer."""
    if not isinstance(topk, int) or isinstance(topk, bool) or topk < 1:
        raise ValueError(f"topk must be a positive integer, got {topk!r}")


def require_kernel_device(tensor: Tensor, name: str, operation: str, interpreted: bool) -> None:
    """Refuse CPU tensors where Triton compiles instead of interpreting."""
    if tensor.device.type == "cpu" and not interpreted:
        raise RuntimeError(
            f"{name} is on the CPU, where {operation} has no kernel: use mla_attention.fusions.reference.{operation}"
        )
