"""The kernel rows of the DSA benchmark: inputs, calls, peers, checks and costs of each operation.

FLOP and byte formulas are in costs.py; ``topk_select`` is a matter of bytes: one read of the fp32 scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import costs
import torch
from measure import Lazy
from torch import Tensor

DEVICE = "cuda"
KV_RANK, ROPE_DIM, INDEX_WIDTH = 512, 64, 128
GATE_ROWS = 128
SCORE_SHAPES = (
    *((32, 2048, 32768), (64, 2048, 32768)),
    # what the KL's backward is held against
    *((32, 4096, 4096), (32, 8192, 8192), (32, 32768, 32768), (32, 65536, 65536)),
)
KL_SHAPES = ((2048, 8192), (2048, 32768), (2048, 65536), (None, 4096))
EAGER_TOKENS = 8192  # rows up to which whole sequences are timed in eager form
Pairs = list[tuple[Tensor, Tensor]]


@dataclass(slots=True)
class KernelCase:
    """One row: calls of the variants, the check of each, what it costs, what is aimed at."""

    name: str
    calls: dict[str, Callable[[], object]]
    checks: dict[str, Callable[[], Pairs]]
    tolerance: float
    flops: int = 0
    bytes: int = 0
    targets: dict[str, float] = field(default_factory=dict)


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random normal numbers on the device."""
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def random_selection(rows: int, keys: int, topk: int, *, causal: bool) -> Tensor:
    """Return int64 [rows, topk] distinct ascending random keys; causal rows see keys up to their own, -1 trailing."""
    pieces = []
    for start in range(0, rows, 1024):
        count = min(1024, rows - start)
        noise = torch.rand(count, keys, device=DEVICE)
        if causal:
            row = torch.arange(start, start + count, device=DEVICE)[:, None]
            noise = noise.masked_fill(torch.arange(keys, device=DEVICE) > row, -1.0)
        values, indices = noise.topk(min(topk, keys), dim=1)
        indices = indices.masked_fill(values < 0, keys).sort(dim=1).values
        pieces.append(indices.masked_fill(indices == keys, -1))
    return torch.cat(pieces)


def finite_pair(actual: Tensor, expected: Tensor) -> Pairs:
    """Return the finite scores beside each other, and where they are -inf as a second pair."""
    masked = (torch.isinf(actual).float() + 1, torch.isinf(expected).float() + 1)
    finite = torch.isfinite(expected)
    return [masked, (actual.masked_fill(~finite, 0.0), expected.masked_fill(~finite, 0.0))]


def einsum_scores(q: Tensor, k: Tensor, w: Tensor, positions: Tensor) -> Tensor:
    """The eager path: all heads' scores at once in bf16, then the weighted sum in fp32."""
    scores = torch.einsum("thd,sd->ths", q, k).relu_()
    total = torch.einsum("th,ths->ts", w.to(q.dtype), scores).float()
    return total.masked_fill(torch.arange(k.shape[0], device=k.device) > positions[:, None], -torch.inf)


def scores_case(index_heads: int, queries: int, keys: int) -> KernelCase:
    """Indexer scores of the last ``queries`` rows of a causal sequence."""
    from mla_attention import fusions
    from mla_attention.fusions import reference

    q, k = normal(queries, index_heads, INDEX_WIDTH), normal(keys, INDEX_WIDTH)
    w = normal(queries, index_heads, scale=(index_heads * INDEX_WIDTH) ** -0.5, dtype=torch.float32)
    positions = torch.arange(keys - queries, keys, device=DEVICE)
    call = lambda f: partial(f, q, k, w, q_positions=positions)  # noqa: E731
    few = slice(max(0, queries - GATE_ROWS), queries)
    short = lambda f: f(q[few], k, w[few], q_positions=positions[few])  # noqa: E731
    calls = {"ours": call(fusions.indexer_scores)}
    if queries <= EAGER_TOKENS:
        calls["eager_twin"] = call(reference.indexer_scores)
        calls["eager_einsum"] = partial(einsum_scores, q, k, w, positions)
    return KernelCase(
        f"indexer_scores/{index_heads}x{INDEX_WIDTH}/{queries}x{keys}",
        calls,
        {"ours": lambda: finite_pair(short(fusions.indexer_scores), short(reference.indexer_scores))},
        2e-3,
        flops=costs.indexer_flops(costs.causal_pairs(queries, keys), index_heads, INDEX_WIDTH),
        targets={"flop_per_s": 600e12},
    )


def topk_case(rows: int, keys: int, topk: int = 2048) -> KernelCase:
    """Exact top-k of causal fp32 scores: the last ``rows`` rows of ``keys`` keys."""
    from mla_attention import fusions
    from mla_attention.fusions import reference

    scores = torch.randn(rows, keys, device=DEVICE)
    last = torch.arange(keys - rows, keys, device=DEVICE)[:, None]
    scores.masked_fill_(torch.arange(keys, device=DEVICE) > last, -torch.inf)
    few = scores[:GATE_ROWS]
    return KernelCase(
        f"topk_select/{topk}/{rows}x{keys}",
        {"ours": partial(fusions.topk_select, scores, topk), "torch_topk": partial(torch.topk, scores, topk)},
        {"ours": lambda: [(fusions.topk_select(few, topk) + 2, reference.topk_select(few, topk) + 2)]},
        0.0,
        bytes=4 * rows * keys,
        targets={"copy_share": 0.5},
    )


def indexer_topk_case(index_heads: int, tokens: int, topk: int = 2048) -> KernelCase:
    """Scores and selection of a whole causal sequence, tiled within the byte budget."""
    from mla_attention import fusions
    from mla_attention.fusions import reference

    q, k = normal(tokens, index_heads, INDEX_WIDTH), normal(tokens, INDEX_WIDTH)
    w = normal(tokens, index_heads, scale=(index_heads * INDEX_WIDTH) ** -0.5, dtype=torch.float32)
    small = min(tokens, 1024)
    short = lambda f: f(q[:small], k[:small], w[:small], small // 4)  # noqa: E731
    return KernelCase(
        f"indexer_topk/{index_heads}x{INDEX_WIDTH}/{tokens}",
        {
            "ours": partial(fusions.indexer_topk, q, k, w, topk),
            "eager_twin": partial(reference.indexer_topk, q, k, w, topk),
        },
        {"ours": lambda: [selection_rows(short(fusions.indexer_topk), short(reference.indexer_topk), small)]},
        3e-2,  # as sets: sums in another order may swap nearly equal scores, a few keys in ten thousand
        flops=costs.indexer_flops(costs.causal_pairs(tokens, tokens), index_heads, INDEX_WIDTH),
    )


def selection_rows(actual: Tensor, expected: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return both selections as one 0/1 row of keys each, so that they compare as sets."""
    rows = []
    for indices in (actual, expected):
        chosen = torch.zeros(indices.shape[0], keys + 1, device=indices.device)
        rows.append(chosen.scatter_(1, indices.masked_fill(indices < 0, keys), 1.0)[:, :keys])
    return rows[0], rows[1]


def sparse_cases(heads: int, rows: int = 4096, keys: int = 32768, topk: int = 2048) -> Iterator[KernelCase]:
    """Sparse MLA forward and backward over random selections, every slot used."""
    from mla_attention import fusions
    from mla_attention.fusions import reference

    width = KV_RANK + ROPE_DIM
    scale = (128 + ROPE_DIM) ** -0.5
    query, key = normal(rows, heads, width, scale=0.5).requires_grad_(), normal(keys, width).requires_grad_()
    selection = random_selection(rows, keys, topk, causal=False)
    grad = normal(rows, heads, KV_RANK)
    flops = costs.sparse_mla_flops(rows * topk, heads, KV_RANK, ROPE_DIM)

    def attend(function: Callable[..., Any], count: int = rows) -> Tensor:
        return function(query[:count], key, selection[:count], scale, KV_RANK)[0]

    def forward(function: Callable[..., Any], count: int = rows) -> Tensor:
        with torch.no_grad():
            return attend(function, count)

    def backward(function: Callable[..., Any], count: int = rows) -> Callable[[], tuple[Tensor, ...]]:
        output = attend(function, count)
        return partial(torch.autograd.grad, output, (query, key), grad[:count], retain_graph=True)

    def deterministic() -> Callable[[], tuple[Tensor, ...]]:
        call = backward(fusions.sparse_mla)

        def run() -> tuple[Tensor, ...]:
            with deterministic_algorithms():
                return call()

        return run

    shape = f"{heads}x{width}/{rows}x{topk}of{keys}"
    ours, twin = fusions.sparse_mla, reference.sparse_mla
    yield KernelCase(
        f"sparse_mla/{shape}/forward",
        {"ours": partial(forward, ours), "eager_twin": partial(forward, twin)},
        {"ours": lambda: [(forward(ours, GATE_ROWS), forward(twin, GATE_ROWS))]},
        1e-2,
        flops=flops[0],
        targets={"flop_per_s": 300e12} if heads >= 64 else {},
    )
    yield KernelCase(
        f"sparse_mla/{shape}/backward",
        {
            "ours": Lazy(partial(backward, ours)),
            "ours_deterministic": Lazy(deterministic),
            "eager_twin": Lazy(partial(backward, twin)),
        },
        {"ours": lambda: list(zip(backward(ours, GATE_ROWS)(), backward(twin, GATE_ROWS)(), strict=True))},
        2e-2,
        flops=flops[1],
        targets={"flop_per_s": 130e12} if heads >= 64 else {},
    )


def kl_cases(index_heads: int, heads: int, tokens: int = 8192, topk: int | None = 2048) -> Iterator[KernelCase]:
    """Indexer KL, forward alone and forward with backward; ``topk`` None is the dense support of the warm-up."""
    from mla_attention import fusions
    from mla_attention.fusions import reference

    width = KV_RANK + ROPE_DIM
    scale = (128 + ROPE_DIM) ** -0.5
    index = (
        normal(tokens, index_heads, INDEX_WIDTH).requires_grad_(),
        normal(tokens, INDEX_WIDTH).requires_grad_(),
        normal(tokens, index_heads, scale=(index_heads * INDEX_WIDTH) ** -0.5, dtype=torch.float32).requires_grad_(),
    )
    query, key = normal(tokens, heads, width, scale=0.5), normal(tokens, width)
    selection = None if topk is None else random_selection(tokens, tokens, topk, causal=True)
    pairs = costs.causal_pairs(tokens, tokens) if topk is None else costs.selected_pairs(tokens, topk)
    flops = costs.indexer_kl_flops(pairs, index_heads, INDEX_WIDTH, heads, width)

    def divergence(function: Callable[..., Tensor], count: int = tokens) -> Tensor:
        indices = None if selection is None else selection[:count]
        keys = slice(0, count)  # causal: the first rows see the first keys only
        q, k, w = index
        return function(q[keys], k[keys], w[keys], query[keys], key[keys], scale, topk_indices=indices)

    def forward(function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return divergence(function)

    def step(function: Callable[..., Tensor], count: int = tokens) -> tuple[Tensor, ...]:
        return torch.autograd.grad(divergence(function, count).sum(), index)

    def check() -> Pairs:
        ours, twin = (divergence(f, GATE_ROWS).detach() for f in (fusions.indexer_kl, reference.indexer_kl))
        gradients = zip(step(fusions.indexer_kl, GATE_ROWS), step(reference.indexer_kl, GATE_ROWS), strict=True)
        return [(ours, twin), *gradients]

    shape = f"{index_heads}x{INDEX_WIDTH}+{heads}x{width}/{tokens}" + ("/dense" if topk is None else f"/top{topk}")
    functions = {"ours": fusions.indexer_kl, "eager_twin": reference.indexer_kl}
    if tokens > EAGER_TOKENS:
        del functions["eager_twin"]
    for kind, call in (("forward", forward), ("step", step)):
        yield KernelCase(
            f"indexer_kl/{shape}/{kind}",
            {name: partial(call, function) for name, function in functions.items()},
            {"ours": check},
            2e-2,
            flops=flops[0] if kind == "forward" else sum(flops),
        )


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Run with torch's deterministic algorithms, then restore the setting."""
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that would be timed
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling


GROUPS: dict[str, Callable[[], Iterator[KernelCase]]] = {
    "scores": lambda: (scores_case(h, t, s) for h, t, s in SCORE_SHAPES),
    "topk": lambda: (topk_case(t, s) for t, s in ((2048, 32768), (4096, 131072))),
    "indexer_topk": lambda: (indexer_topk_case(32, t) for t in (32768,)),
    "sparse": lambda: (case for heads in (64, 128, 16) for case in sparse_cases(heads)),
    "kl": lambda: (case for topk, tokens in KL_SHAPES for case in kl_cases(32, 64, tokens, topk)),
}
