"""What selects what, told a second time: scores as loops in fp64, top-k as a sort in Python."""

import math
from itertools import pairwise

import torch
from torch import Tensor


def select(scores: Tensor, topk: int) -> Tensor:
    """Top-k by sorting (is NaN, -score, index); -inf is no key."""
    rows = []
    for row in scores.double().tolist():
        keys = [i for i, x in enumerate(row) if x != -math.inf]
        keys.sort(key=lambda i: (math.isnan(row[i]), 0.0 if math.isnan(row[i]) else -row[i], i))
        taken = sorted(keys[:topk])
        rows.append(taken + [-1] * (min(topk, len(row)) - len(taken)))
    return torch.tensor(rows, dtype=torch.int64, device=scores.device).reshape(len(rows), min(topk, scores.shape[1]))


def scores(q: Tensor, k: Tensor, weights: Tensor, relu: bool = True, cu_seqlens=None, q_positions=None) -> Tensor:
    """fp64 scores, one query row and head at a time."""
    rows, heads, _ = q.shape
    out = torch.full((rows, k.shape[0]), -math.inf, dtype=torch.float64, device=q.device)
    for t in range(rows):
        position = t if q_positions is None else int(q_positions[t])
        start = 0
        if cu_seqlens is not None:
            starts = [int(a) for a, b in pairwise(cu_seqlens) if a <= position < b]
            if not starts:
                continue
            (start,) = starts
        if position < 0:
            continue
        seen = k[start : position + 1].double()
        total = torch.zeros(seen.shape[0], dtype=torch.float64, device=q.device)
        for h in range(heads):
            logit = seen @ q[t, h].double()
            total += weights[t, h].double() * (logit.clamp(min=0) if relu else logit)
        out[t, start : position + 1] = total
    return out


def awkward_rows(keys: int, device: str = "cpu") -> Tensor:
    """fp32 [12, keys]: ties, zeros of both signs, NaN, infinities, gaps, order, denormals."""
    generator = torch.Generator().manual_seed(keys)
    x = torch.randn(12, keys, generator=generator)
    x[1] = x[1].round()  # many ties
    x[2] = torch.where(torch.rand(keys, generator=generator) < 0.5, 0.0, -0.0)
    x[3, ::3] = math.nan
    x[4, 1:] = -math.inf
    x[5] = torch.arange(keys) * 1.0  # each beats all before
    x[6, ::2] = -math.inf
    x[7] = math.nan
    x[8] = x[8].clamp(max=0.0) * (torch.rand(keys, generator=generator) < 0.5)  # a tie of zeros at the top
    x[9] = x[9] * 1e-40  # denormals of both signs
    x[10, ::4], x[10, 1::4], x[10, 2::4] = math.inf, -math.inf, math.nan
    x[11] = -math.inf
    return x.to(device)
