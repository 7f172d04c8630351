"""Differentiable collectives along the first axis, each the transpose of another.

| forward | backward | where |
|---|---|---|
| identity | all-reduce | a replicated tensor on its way into computation that each rank does a share of |
| all-reduce | identity | partial results that every rank needs whole |
| all-gather rows | reduce-scatter rows | shards that every rank needs whole and uses in its own way |
| all-gather rows | own rows | shards that every rank needs whole and uses as all others do |
| reduce-scatter rows | all-gather rows | partial results of which every rank keeps its rows |

Source: the conjugate operators of Megatron-LM (arXiv 1909.08053, 2205.05198).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mla_attention.zigzag import KeyOrder


def sum_gradients(group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors`; their gradients are summed over the group, in one all-reduce for all that share leading axes."""
    return _SumGradients.apply(group, *tensors)


def sum_over_ranks(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `tensor` over the group; the gradient passes as it is."""
    return _SumOverRanks.apply(tensor, group)


def gather_rows(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """`[r, ...]` of every rank, in rank order, as `[r * size, ...]`; the gradient is summed and scattered back."""
    return _GatherRows.apply(tensor, group, None, True)


def gather_same_rows(tensor: Tensor, group: ProcessGroup, order: KeyOrder | None = None) -> Tensor:
    """As `gather_rows`, or in the given order; of the gradient, the same on every rank, each keeps its own rows."""
    return _GatherRows.apply(tensor, group, order, False)


def gather_keys(tensor: Tensor, group: ProcessGroup, order: KeyOrder) -> Tensor:
    """`[r, ...]` of every rank as `[r * size, ...]` in global order; the gradient is summed and scattered back."""
    return _GatherRows.apply(tensor, group, order, True)


def sum_and_scatter_rows(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's `[r, ...]` of the sum over ranks of `[r * size, ...]`; the gradient is gathered."""
    return _SumAndScatterRows.apply(tensor, group)


def largest_over_ranks(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The largest of each element over the group; no gradient."""
    largest = tensor.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def numbers_of_ranks(numbers: list[int], device: torch.device, group: ProcessGroup) -> list[list[int]]:
    """The numbers that each rank of the group gives, on the host: one device sync."""
    own = torch.tensor([numbers], dtype=torch.int64, device=device)
    return _gather(own, group).tolist()


# torch 2.13 renamed the two collectives on one tensor; the old names warn there. They are looked up at the call, so
# that a tool that wraps torch.distributed sees them.


def _gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    whole = tensor.new_empty(tensor.shape[0] * group.size(), *tensor.shape[1:])
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(whole, tensor.contiguous(), group=group)
    return whole


def _scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    part = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    scatter(part, tensor.contiguous(), group=group)
    return part


def _sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: ProcessGroup, *tensors: Tensor):
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        wanted = [i for i, w in enumerate(ctx.needs_input_grad[1:]) if w]
        summed: list[Tensor | None] = [None] * len(gradients)
        if len(wanted) == 1:
            summed[wanted[0]] = _sum(gradients[wanted[0]], ctx.group)
        elif wanted:
            total = torch.cat([gradients[i] for i in wanted], dim=-1)
            dist.all_reduce(total, group=ctx.group)
            parts = total.split([gradients[i].shape[-1] for i in wanted], dim=-1)
            for i, part in zip(wanted, parts, strict=True):
                summed[i] = part.to(gradients[i].dtype)
        return None, *summed


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return gradient, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: ProcessGroup, order: KeyOrder | None, summed: bool) -> Tensor:
        ctx.group, ctx.summed, ctx.rows = group, summed, tensor.shape[0]
        gathered = _gather(tensor, group)
        if order is None:
            ctx.order = None
            return gathered
        ctx.order = order.rows
        return gathered.index_select(0, order.places)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        mine = slice(ctx.group.rank() * ctx.rows, (ctx.group.rank() + 1) * ctx.rows)
        if not ctx.summed:
            own = gradient[mine] if ctx.order is None else gradient.index_select(0, ctx.order[mine])
            return own, None, None, None
        if ctx.order is not None:
            gradient = gradient.index_select(0, ctx.order)
        return _scatter(gradient, ctx.group), None, None, None


class _SumAndScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return _gather(gradient, ctx.group), None
