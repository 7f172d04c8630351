"""The indexer's loss: from divergences of rows to one scalar, and that scalar onto the output's graph.

    loss = coeff * mean over rows that hold a token of KL_r          (their sum with calculate_per_token_loss)

KL_r (`fusions.indexer_kl`) compares the attention that the heads really paid with the indexer's softmax; it reaches no
parameter but the indexer's.

Source: DeepSeek-V3.2, training of the indexer; attaching as Megatron-LM's DSAIndexerLossAutoScaler, its scale kept on
the layer instead of in a global.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_attention.communication import ONE_RANK, Communication
from mla_attention.configs import MLAConfig
from mla_attention.fusions.once_differentiable import once_differentiable
from mla_attention.token_layout import TokenLayout


def indexer_loss(divergence: Tensor, tokens: TokenLayout, config: MLAConfig, comm: Communication = ONE_RANK) -> Tensor:
    """coeff * mean (or sum) of the divergences of all rows that hold a token; 0 where there is none.

    Under context parallelism every rank gets the value over all ranks' rows, and its backward reaches its own rows: the
    ranks' gradients add up to those of one rank.

    Args:
        divergence: KL of each query row, fp32 at least, `[B, S]`, packed `[1, T]`.
        tokens: layout of the rows.
        config: coefficient, and whether to sum.
        comm: sums over the context-parallel ranks.

    Returns:
        Scalar in the dtype of `divergence`.
    """
    keep = tokens.token_rows()
    every_row = tokens.keys.token_rows()  # of all context-parallel ranks
    if keep is None or every_row is None:
        rows = divergence.new_full((), divergence.numel() * tokens.cp_size)
    else:
        divergence, rows = torch.where(keep, divergence, 0.0), every_row.sum()
    total = comm.sum_over_context(divergence.sum()) * config.dsa_indexer_loss_coeff
    return total if config.calculate_per_token_loss else total / rows.clamp(min=1)


def attach_loss(output: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """`output` itself, whose backward also sends the gradient `scale` into `loss`."""
    return _AttachLoss.apply(output, loss, scale)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.gradient = loss.new_full((), scale)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return gradient, ctx.gradient, None
