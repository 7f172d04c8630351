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

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mla_attention.fusions.once_differentiable import once_differentiable
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


class KeysOnTheWay:
    """A `gather_keys` in two halves, so that what is computed between them hides its travel, in both directions.

        started = KeysOnTheWay(rows, group); ...; keys = started.finish(order)

    The forward gathers from the first half to the second. The backward sums and scatters from the second half to the
    first: autograd runs what was computed between them in between.

    Args:
        rows: `[r, ...]` of this rank.
        group: ranks that are gathered from.
    """

    def __init__(self, rows: Tensor, group: ProcessGroup) -> None:
        self.group = group
        self.work: dist.Work | None = None
        self.operands: tuple[Tensor, Tensor] | None = None  # of the collective under way: (sent, received)
        self.rows = _BeginGather.apply(rows, self)  # for `finish` alone: its gradient is not there before it is awaited

    def finish(self, order: KeyOrder) -> Tensor:
        """`[r * size, ...]` in global order."""
        return _FinishGather.apply(self.rows, self, order)

    def send(self, tensor: Tensor, *, gather: bool) -> Tensor:
        """Start an all-gather of rows, or a sum and scatter of them; what it returns is there after `wait`."""
        sent = tensor.contiguous()
        size = self.group.size()
        rows = sent.shape[0] * size if gather else sent.shape[0] // size
        received = sent.new_empty(rows, *sent.shape[1:])
        collective = _all_gather() if gather else _reduce_scatter()
        self.work = collective(received, sent, group=self.group, async_op=True)
        self.operands = sent, received
        return received

    def wait(self) -> Tensor:
        """What was sent for last."""
        if self.work is None or self.operands is None:
            raise RuntimeError("KeysOnTheWay: waited for without a collective under way")
        self.work.wait()
        received = self.operands[1]
        self.work = self.operands = None
        return received


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


def _all_gather() -> Callable:
    return dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def _reduce_scatter() -> Callable:
    return dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def _gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    whole = tensor.new_empty(tensor.shape[0] * group.size(), *tensor.shape[1:])
    _all_gather()(whole, tensor.contiguous(), group=group)
    return whole


def _scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    part = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    _reduce_scatter()(part, tensor.contiguous(), group=group)
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


class _BeginGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, transfer: KeysOnTheWay) -> Tensor:
        ctx.transfer = transfer
        transfer.send(rows, gather=True)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return ctx.transfer.wait(), None


class _FinishGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, transfer: KeysOnTheWay, order: KeyOrder) -> Tensor:
        ctx.transfer, ctx.order = transfer, order
        return transfer.wait().index_select(0, order.places)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return ctx.transfer.send(gradient.index_select(0, ctx.order.rows), gather=False), None, None


class _SumAndScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return _gather(gradient, ctx.group), None
