"""The output projection of heads that were attended in groups, without putting gradients or kept contexts together.

    out = [c_0 | c_1 | ..] W_o^T        dc_g = dout W_o[:, g]        dW_o[:, g] = dout^T c_g

One group goes through the module. Of several each gradient is a GEMM of its own that writes where the next step reads:
autograd around a concatenation would write the gradient of all heads, copy each group's slice of it (the attention's
backward wants it contiguous), and keep the concatenation beside the contexts that the attention keeps anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from mla_attention.argument_checks import as_autocast
from mla_attention.fusions.once_differentiable import once_differentiable

if TYPE_CHECKING:
    from mla_attention.layers.torch_layers import Linear


def project_contexts(linear_proj: Linear, contexts: tuple[Tensor, ...]) -> Tensor:
    """Output `[.., H]` of the contexts `[.., n/g, Dv]` of g groups of heads, in the order of the heads.

    Args:
        linear_proj: `[H, n*Dv]`; of several groups a plain one whose input and output nobody watches.
        contexts: one for each group.
    """
    flat = [context.flatten(-2) for context in contexts]
    if len(flat) == 1:
        return linear_proj(flat[0])
    return _ProjectGroups.apply(*as_autocast(linear_proj.local_weight(), *flat))


class _ProjectGroups(torch.autograd.Function):
    """weight `[H, n*Dv]`, contexts `[.., n/g*Dv]` of each group -> `[.., H]`."""

    @staticmethod
    def forward(ctx, weight: Tensor, *contexts: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *contexts)
        return F.linear(torch.cat(contexts, dim=-1), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weight, *contexts = ctx.saved_tensors
        widths = [context.shape[-1] for context in contexts]
        columns = weight.split(widths, dim=1)
        gradients: list[Tensor | None] = [
            grad @ part if needed else None for part, needed in zip(columns, ctx.needs_input_grad[1:], strict=True)
        ]
        dweight = None
        if ctx.needs_input_grad[0]:
            dweight = torch.empty_like(weight)
            rows = grad.flatten(0, -2).mT
            for part, context in zip(dweight.split(widths, dim=1), contexts, strict=True):
                torch.mm(rows, context.flatten(0, -2), out=part)
        return dweight, *gradients
