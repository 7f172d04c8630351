"""Host checks of `sparse_mla` and `indexer_kl`: what kernels and unfused twins refuse before any launch.

Checks of shapes and dtypes cost nothing. Checks of values need a device sync: they run only under
MLA_ATTENTION_VALIDATE=1.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from ..host_checks import check_tensor, values_are_validated

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_RANK, _LARGEST_ROPE = 1024, 256
_LARGEST_INDEXER_DIM, _LARGEST_INDEXER_HEADS = 256, 256
_INTEGERS = (torch.int32, torch.int64)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_float(name: str, tensor: Tensor, dims: int, *, allow_double: bool) -> None:
    """Refuse a tensor of another rank or dtype than the operation takes."""
    allowed = (*_FLOATS, torch.float64) if allow_double else _FLOATS
    check_tensor(name, tensor)
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} must be one of {_names(allowed)}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two tensors on different devices."""
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on {other_name}'s device {other.device}, got {tensor.device}")


def check_query_and_key(query: Tensor, key: Tensor, softmax_scale: float, *, allow_double: bool) -> None:
    """Refuse an absorbed query [T, n, R+Dr] and key [S, R+Dr] that do not fit together, or a scale that is no scale."""
    check_float("query", query, 3, allow_double=allow_double)
    check_float("key", key, 2, allow_double=allow_double)
    if key.dtype != query.dtype:
        raise ValueError(f"key must have query's dtype {query.dtype}, got {key.dtype}")
    if key.shape[1] != query.shape[2]:
        raise ValueError(f"key must be [S, {query.shape[2]}] like query's last width, got {tuple(key.shape)}")
    if query.shape[1] < 1:
        raise ValueError(f"query must have at least one head, got shape {tuple(query.shape)}")
    check_same_device("key", key, "query", query)
    check_key_rows("key", key)
    is_number = isinstance(softmax_scale, int | float) and not isinstance(softmax_scale, bool)
    if not (is_number and math.isfinite(softmax_scale) and softmax_scale >= 0.0):
        raise ValueError(f"softmax_scale must be a finite Python number >= 0, got {softmax_scale!r}")


def check_key_rows(name: str, key: Tensor) -> None:
    """Refuse more keys than a 32-bit index can name."""
    if key.shape[0] >= 2**31:
        raise ValueError(f"{name} must have fewer than 2**31 rows, got {key.shape[0]}")


def check_kv_rank(kv_rank: int, width: int) -> None:
    """Refuse a latent width that leaves no latent or no rotary channel."""
    if not isinstance(kv_rank, int) or isinstance(kv_rank, bool) or not 1 <= kv_rank < width:
        raise ValueError(f"kv_rank must be an integer in [1, {width}), {width} = query's last width, got {kv_rank!r}")


def check_kernel_widths(kv_rank: int, width: int) -> None:
    """Refuse widths whose tiles a kernel cannot hold."""
    if kv_rank > _LARGEST_RANK or width - kv_rank > _LARGEST_ROPE:
        raise ValueError(
            f"kv_rank must be at most {_LARGEST_RANK}, with at most {_LARGEST_ROPE} further channels, for the kernel, "
            f"got {kv_rank} and {width - kv_rank}"
        )


def check_topk_indices(topk_indices: Tensor, query: Tensor, num_keys: int) -> None:
    """Refuse indices of a wrong shape or dtype; under MLA_ATTENTION_VALIDATE=1 also out-of-range and repeated ones."""
    check_tensor("topk_indices", topk_indices)
    if topk_indices.dtype not in _INTEGERS:
        raise ValueError(f"topk_indices must be one of {_names(_INTEGERS)}, got {topk_indices.dtype}")
    if topk_indices.dim() != 2 or topk_indices.shape[0] != query.shape[0]:
        raise ValueError(
            f"topk_indices must be [T={query.shape[0]}, K] as query's rows, got {tuple(topk_indices.shape)}"
        )
    check_same_device("topk_indices", topk_indices, "query", query)
    if not values_are_checked() or topk_indices.numel() == 0:
        return
    lowest, highest = (int(value) for value in torch.aminmax(topk_indices))
    if lowest < -1 or highest >= num_keys:
        raise ValueError(f"topk_indices must lie in [-1, {num_keys}), got values from {lowest} to {highest}")
    ordered = topk_indices.sort(dim=-1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(repeated.any()):
        row = int(repeated.any(-1).nonzero()[0])
        raise ValueError(f"topk_indices must be distinct within a row (except -1), got a repeated index in row {row}")


def check_indexer(
    index_q: Tensor, index_k: Tensor, index_weights: Tensor, query: Tensor, key: Tensor, *, allow_double: bool
) -> None:
    """Refuse indexer inputs that fit neither each other nor the attention's tokens and keys."""
    check_float("index_q", index_q, 3, allow_double=allow_double)
    check_float("index_k", index_k, 2, allow_double=allow_double)
    check_float("index_weights", index_weights, 2, allow_double=allow_double)
    if index_k.dtype != index_q.dtype:
        raise ValueError(f"index_k must have index_q's dtype {index_q.dtype}, got {index_k.dtype}")
    if index_q.shape[0] != query.shape[0] or index_q.shape[1] < 1:
        raise ValueError(f"index_q must be [T={query.shape[0]}, Hi, Di] like query's rows, got {tuple(index_q.shape)}")
    if tuple(index_k.shape) != (key.shape[0], index_q.shape[2]):
        raise ValueError(f"index_k must be [S={key.shape[0]}, Di={index_q.shape[2]}], got {tuple(index_k.shape)}")
    if tuple(index_weights.shape) != tuple(index_q.shape[:2]):
        raise ValueError(f"index_weights must be {tuple(index_q.shape[:2])}, got {tuple(index_weights.shape)}")
    for name, tensor in (("index_q", index_q), ("index_k", index_k), ("index_weights", index_weights)):
        check_same_device(name, tensor, "query", query)


def check_indexer_widths(index_q: Tensor, query: Tensor) -> None:
    """Refuse widths and head counts whose tiles a kernel cannot hold."""
    if index_q.shape[2] > _LARGEST_INDEXER_DIM:
        raise ValueError(f"index_q must be at most {_LARGEST_INDEXER_DIM} wide for the kernel, got {index_q.shape[2]}")
    if index_q.shape[1] > _LARGEST_INDEXER_HEADS:
        raise ValueError(
            f"index_q must have at most {_LARGEST_INDEXER_HEADS} heads for the kernel, got {index_q.shape[1]}"
        )
    if not 2 <= query.shape[2] <= _LARGEST_RANK + _LARGEST_ROPE:
        raise ValueError(
            f"query must be 2 to {_LARGEST_RANK + _LARGEST_ROPE} wide for the kernel, got {query.shape[2]}"
        )


def check_positions(
    query: Tensor, num_keys: int, cu_seqlens: Tensor | None, q_positions: Tensor | None, lse: Tensor | None
) -> None:
    """Refuse offsets, positions or a log-sum-exp of a wrong shape or dtype; validation also looks at values."""
    rows, heads = query.shape[:2]
    for name, tensor in (("cu_seqlens", cu_seqlens), ("q_positions", q_positions), ("lse", lse)):
        if tensor is not None:
            check_tensor(name, tensor)
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in _INTEGERS:
            raise ValueError(
                f"cu_seqlens must be int32 or int64 [sequences + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            )
        check_same_device("cu_seqlens", cu_seqlens, "query", query)
    if q_positions is not None:
        if tuple(q_positions.shape) != (rows,) or q_positions.dtype not in _INTEGERS:
            raise ValueError(
                f"q_positions must be int32 or int64 [T={rows}], got {q_positions.dtype} {tuple(q_positions.shape)}"
            )
        check_same_device("q_positions", q_positions, "query", query)
    if lse is not None:
        if tuple(lse.shape) != (rows, heads) or not lse.dtype.is_floating_point:
            raise ValueError(f"lse must be floating [T={rows}, n={heads}], got {lse.dtype} {tuple(lse.shape)}")
        check_same_device("lse", lse, "query", query)
    if not values_are_checked():
        return
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or any(b < a for a, b in pairwise(offsets)) or offsets[-1] > num_keys:
            raise ValueError(f"cu_seqlens must rise from 0 to at most {num_keys} keys, got {offsets}")
    if q_positions is not None and q_positions.numel() and int(q_positions.max()) >= num_keys:
        raise ValueError(f"q_positions must be below the {num_keys} keys, got {int(q_positions.max())}")


def check_budget(budget_bytes: int) -> None:
    """Refuse a byte budget that is no positive integer."""
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool) or budget_bytes < 1:
        raise ValueError(f"budget_bytes must be a positive integer, got {budget_bytes!r}")


def values_are_checked() -> bool:
    """Whether MLA_ATTENTION_VALIDATE=1 asks for the checks that cost a device sync."""
    return values_are_validated()
