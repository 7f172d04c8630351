"""Outputs that a later step reads in its backward, computed again there instead of kept.

`with_recomputed_operands(produce, consume, inputs, parameters)` equals `consume(*produce(*inputs))`. What `consume`
saves of the produced tensors (core attention saves query, key and value) is not stored: the first of them that a
backward asks for runs `produce` once more, and the graph of that run then carries the gradient on to inputs and
parameters. `produce` runs twice in all; `consume` once. (torch.utils.checkpoint around both would run the attention
twice as well; around `produce` alone it would keep query, key and value.)

Source: the idea is Megatron-LM's CheckpointWithoutOutput; here it rests on autograd's saved-tensor hooks, so parameters
get their gradients through autograd as usual (hooks, `torch.autograd.grad`, FSDP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mla_attention.argument_checks import is_autocast
from mla_attention.fusions.once_differentiable import once_differentiable


def with_recomputed_operands(
    produce: Callable[..., tuple[Tensor, ...]],
    consume: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    module: nn.Module,
) -> Tensor:
    """`consume(*produce(*inputs))`, the produced tensors computed again in backward.

    Args:
        produce: deterministic function of the inputs and of `parameters`, which it reaches by itself.
        consume: function of the produced tensors.
        inputs: tensors that produce takes.
        parameters: those that produce uses; they get their gradients here.
        module: where produce finds them. Backward puts them back there for its run, should others have taken their
            places: `torch.func.functional_call` lends a module its tensors for the forward only.

    Raises:
        RuntimeError: in backward, if a parameter was changed in place after the forward.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*inputs, *parameters)):
        return consume(*produce(*inputs))
    if torch.compiler.is_compiling():  # the compiler recomputes what a checkpointed region hands out, and nothing else
        return consume(*checkpoint(produce, *inputs, use_reentrant=False))
    produced = _Produce.apply(produce, _places(module, parameters), len(inputs), *inputs, *parameters)
    node = next(t.grad_fn for t in produced if t.grad_fn is not None)
    # By storage, not by address: on meta all addresses are 0.
    places = {t.untyped_storage()._cdata: i for i, t in enumerate(produced) if t.numel()}

    def pack(tensor: Tensor) -> Tensor | tuple:
        place = places.get(tensor.untyped_storage()._cdata) if tensor.numel() else None
        if place is None:
            return tensor
        return place, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Tensor | tuple) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        place, shape, stride, offset = packed
        with torch.no_grad():
            return _run_again(node)[1][place].as_strided(shape, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consume(*produced)


class _Place(NamedTuple):
    """Where a module keeps a parameter, and which one in which version it was in forward."""

    parameters: dict[str, Tensor]
    name: str
    parameter: Tensor
    version: int


def _places(module: nn.Module, parameters: Sequence[Tensor]) -> list[_Place]:
    wanted = {id(p) for p in parameters}
    return [
        _Place(owner._parameters, name, p, p._version)  # type: ignore[arg-type]
        for owner in module.modules()
        for name, p in owner._parameters.items()
        if id(p) in wanted and p is not None
    ]


@contextmanager
def _as_in_forward(places: list[_Place]) -> Iterator[None]:
    """The module with the parameters of the forward in their places."""
    for place in places:
        if place.parameter._version != place.version:
            raise RuntimeError(
                f"recompute_up_proj: given True, and a projection's {place.name} changed in place between forward and "
                "backward; allowed are unchanged parameters, or False"
            )
    moved = [(p, p.parameters[p.name]) for p in places if p.parameters[p.name] is not p.parameter]
    for place, _ in moved:
        place.parameters[place.name] = place.parameter
    try:
        yield
    finally:
        for place, present in moved:
            place.parameters[place.name] = present


class _Produce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, produce, places: list[_Place], n_inputs: int, *tensors: Tensor):
        ctx.produce = produce
        ctx.places = places
        ctx.parameters = tensors[n_inputs:]
        ctx.wants_gradient = tuple(t.requires_grad for t in tensors[:n_inputs])
        ctx.save_for_backward(*tensors[:n_inputs])
        device = tensors[0].device
        ctx.autocast = (
            device.type,
            None if device.type == "meta" else torch.get_autocast_dtype(device.type),
            is_autocast(device),
        )
        ctx.second_run = None
        return produce(*tensors[:n_inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        inputs, outputs = _run_again(ctx)
        ctx.second_run = None  # a second backward through a retained graph runs produce anew
        wanted = [t for t in (*inputs, *ctx.parameters) if t.requires_grad]
        reached = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        found = iter(torch.autograd.grad([o for o, _ in reached], wanted, [g for _, g in reached], allow_unused=True))
        return (None, None, None, *(next(found) if t.requires_grad else None for t in (*inputs, *ctx.parameters)))


def _run_again(ctx: Any) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    if ctx.second_run is None:
        device, dtype, enabled = ctx.autocast
        inputs = [t.detach().requires_grad_(w) for t, w in zip(ctx.saved_tensors, ctx.wants_gradient, strict=True)]
        autocast = nullcontext() if dtype is None else torch.autocast(device, dtype=dtype, enabled=enabled)
        with torch.enable_grad(), autocast, _as_in_forward(ctx.places):
            ctx.second_run = inputs, ctx.produce(*inputs)
    return ctx.second_run
