"""Row by row: the divergence between a target distribution and the softmax of scores, and its gradient in the scores.

    q[s]        = target[s] / sum target                       target is not normalised
    log p[s]    = scores[s] - log sum exp(scores)
    kl          = sum_s q[s] * (log q[s] - log p[s])           0 log 0 = 0
    d kl / d scores[s] = p[s] - q[s]

over begin <= s < end. Layout: scores and target fp32 [T, L], unit last stride. Each row is read twice, 16 bytes an
element (the second time from a cache, for rows of some thousand elements), and the gradient written, 4 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sparse_tiles import interpreted, loop_bound

_BLOCK = 1024


@triton.jit(do_not_specialize=["stride_scores", "stride_target"])
def _kl_rows_kernel(
    p_scores,
    p_target,
    p_begin,
    p_end,
    p_kl,
    p_gradient,
    stride_scores,
    stride_target,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_element = tl.arange(0, BLOCK)
    begin = tl.load(p_begin + i_row)
    end = tl.load(p_end + i_row)
    p_score_row = p_scores + i_row * stride_scores
    p_target_row = p_target + i_row * stride_target

    highest = -float("inf")
    partition = 0.0
    mass = 0.0
    for start in tl.range(loop_bound(begin, INTERPRETED), loop_bound(end, INTERPRETED), BLOCK):
        m_element = start + o_element < end
        b_score = tl.load(p_score_row + start + o_element, mask=m_element, other=-float("inf"))
        b_target = tl.load(p_target_row + start + o_element, mask=m_element, other=0.0)
        new_highest = tl.maximum(highest, tl.max(b_score, 0))
        partition = partition * tl.exp(highest - new_highest) + tl.sum(tl.exp(b_score - new_highest), 0)
        highest = new_highest
        mass += tl.sum(b_target, 0)
    lse = highest + tl.log(tl.where(partition == 0.0, 1.0, partition))
    mass = tl.where(mass == 0.0, 1.0, mass)

    b_kl = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(loop_bound(begin, INTERPRETED), loop_bound(end, INTERPRETED), BLOCK):
        m_element = start + o_element < end
        b_log_p = tl.load(p_score_row + start + o_element, mask=m_element, other=0.0) - lse
        b_q = tl.load(p_target_row + start + o_element, mask=m_element, other=0.0) / mass
        m_some = b_q > 0.0
        b_kl += tl.where(m_some, b_q * (tl.log(tl.where(m_some, b_q, 1.0)) - b_log_p), 0.0)
        if WRITE_GRADIENT:
            p_gradient_row = p_gradient + i_row * stride_scores
            tl.store(p_gradient_row + start + o_element, tl.exp(b_log_p) - b_q, mask=m_element)
    tl.store(p_kl + i_row, tl.sum(b_kl, 0))


def kl_rows(scores: Tensor, target: Tensor, begin: Tensor, end: Tensor, *, overwrite_scores: bool) -> Tensor:
    """Divergence of every row.

    Args:
        scores: fp32 [T, L]; the gradient is written over it on request.
        target: fp32 [T, L], not normalised, not negative.
        begin: int32 [T], first element of each row's support.
        end: int32 [T], one past the last element; elements outside are neither read nor written.
        overwrite_scores: leave d kl / d scores in scores.

    Returns:
        fp32 [T]; 0 for a row with an empty support.
    """
    rows = scores.shape[0]
    kl = torch.empty(rows, dtype=torch.float32, device=scores.device)
    if rows:
        _kl_rows_kernel[(rows,)](
            scores,
            target,
            begin,
            end,
            kl,
            scores,
            scores.stride(0),
            target.stride(0),
            WRITE_GRADIENT=overwrite_scores,
            BLOCK=_BLOCK,
            INTERPRETED=interpreted(),
            num_warps=4,
        )
    return kl
