"""Sparse multi-head latent attention over selected keys: the public function, its operators and its autograd rule.

    out[t, h] = sum_j softmax_j(softmax_scale * query[t, h] . key[slot]) * key[slot, :R],   slot = topk_indices[t, j]

Kernels: sparse_mla_forward.py and sparse_mla_backward.py, on the packed slots of sparse_tiles.py. Saved for the
backward pass: query, key, out, lse and the 32-bit slots; probabilities are recomputed. Under
`torch.use_deterministic_algorithms(True)` the key's gradient is summed in a fixed order, without atomics.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..host_checks import check_kernel_device
from ..once_differentiable import once_differentiable
from . import attention_checks as checks
from .operator import operator
from .sparse_mla_backward import backward_blocks, launch_backward
from .sparse_mla_forward import launch_forward
from .sparse_tiles import (
    SLOT_MULTIPLE,
    interpreted,
    pack_slots,
    padded_width,
    shared_memory,
    takes_hopper_kernels,
)

PREFER_HOPPER_BACKWARD = True  # 188 against 177 TFLOP/s for 64 heads on an H200, 226 against 220 for 128


@operator("pack_slots")
def pack_slots_op(topk_indices: Tensor, begin: Tensor | None, end: Tensor | None) -> tuple[Tensor, Tensor]:
    """`pack_slots` as a registered operator: the range of keys as two tensors, or none."""
    return pack_slots(topk_indices, None if begin is None or end is None else (begin, end))


@pack_slots_op.register_fake
def _(topk_indices: Tensor, begin: Tensor | None, end: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, slots = topk_indices.shape
    padded = (slots + SLOT_MULTIPLE - 1) // SLOT_MULTIPLE * SLOT_MULTIPLE
    return (
        topk_indices.new_empty((rows, padded), dtype=torch.int32),
        topk_indices.new_empty((rows,), dtype=torch.int32),
    )


@operator("sparse_mla_forward")
def _forward(
    query: Tensor, key: Tensor, slots: Tensor, counts: Tensor, softmax_scale: float, kv_rank: int
) -> tuple[Tensor, Tensor]:
    return launch_forward(query, key, slots, counts, softmax_scale, kv_rank)


@_forward.register_fake
def _(
    query: Tensor, key: Tensor, slots: Tensor, counts: Tensor, softmax_scale: float, kv_rank: int
) -> tuple[Tensor, Tensor]:
    return (
        query.new_empty((*query.shape[:2], kv_rank)),
        query.new_empty(query.shape[:2], dtype=torch.float32),
    )


@operator("sparse_mla_backward")
def _backward(
    query: Tensor,
    key: Tensor,
    slots: Tensor,
    counts: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    softmax_scale: float,
    ordered: bool,
) -> tuple[Tensor, Tensor]:
    width = padded_width(out.shape[2]) + padded_width(query.shape[2] - out.shape[2])
    blocks = backward_blocks(query.shape[1], width, query.element_size(), shared_memory(query))
    if PREFER_HOPPER_BACKWARD and takes_hopper_kernels(query, key, out.shape[2]):
        blocks = replace(blocks, variant="hopper")
    return launch_backward(
        query, key, slots, counts, out, lse, grad_out, grad_lse, softmax_scale, blocks=blocks, ordered=ordered
    )


@_backward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    slots: Tensor,
    counts: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    softmax_scale: float,
    ordered: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key)


class _SparseMLA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, topk_indices: Tensor, softmax_scale: float, kv_rank: int
    ) -> tuple[Tensor, Tensor]:
        query, key = query.contiguous(), key.contiguous()
        slots, counts = pack_slots_op(topk_indices.contiguous(), None, None)
        out, lse = _forward(query, key, slots, counts, softmax_scale, kv_rank)
        ctx.save_for_backward(query, key, slots, counts, out, lse)
        ctx.softmax_scale = softmax_scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, slots, counts, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(out.dtype).contiguous()
        grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
        ordered = torch.are_deterministic_algorithms_enabled()
        grad_query, grad_key = _backward(
            query, key, slots, counts, out, lse, grad_out, grad_lse, ctx.softmax_scale, ordered
        )
        return grad_query, grad_key, None, None, None


def sparse_mla(
    query: Tensor, key: Tensor, topk_indices: Tensor, softmax_scale: float, kv_rank: int
) -> tuple[Tensor, Tensor]:
    """Attend, per token, to its selected rows of one key shared by all heads; the value is the key's latent part.

        x[t, h, j] = softmax_scale * query[t, h] . key[topk_indices[t, j]]      (slots of -1 take no part)
        lse[t, h]  = log sum_j exp(x[t, h, j])
        out[t, h]  = sum_j exp(x[t, h, j] - lse[t, h]) * key[topk_indices[t, j], :kv_rank]

    Args:
        query: absorbed queries [T, n, R + Dr]; float16, bfloat16 or float32.
        key: normed latent and rotated shared rope key [S, R + Dr], query's dtype.
        topk_indices: selected key rows [T, K], int32 or int64, -1 = unused slot anywhere, otherwise distinct in a row.
        softmax_scale: factor of the scores, finite and >= 0.
        kv_rank: R, the width of the value.

    Returns:
        (out, lse): latent output [T, n, R] in query's dtype and natural log-sum-exp fp32 [T, n], both differentiable in
        query and key. A row with nothing selected has output 0, lse -inf, gradient 0. The key's gradient is added up in
        fp32 and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; under MLA_ATTENTION_VALIDATE=1 also bad or repeated indices.
        RuntimeError: CPU tensors, outside Triton's interpreter.

    Source: DeepSeek-V3.2 (sparse attention in the absorbed, multi-query form of MLA).
    """
    checks.check_query_and_key(query, key, softmax_scale, allow_double=False)
    checks.check_kv_rank(kv_rank, query.shape[2])
    checks.check_kernel_widths(kv_rank, query.shape[2])
    checks.check_topk_indices(topk_indices, query, key.shape[0])
    check_kernel_device("sparse_mla", query, interpreted())
    return _SparseMLA.apply(query, key, topk_indices, float(softmax_scale), kv_rank)
