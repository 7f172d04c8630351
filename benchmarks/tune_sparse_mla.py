"""Which cut of the work is fastest: each variant of the sparse attention kernels, checked, then timed kernel by kernel.

    python benchmarks/tune_sparse_mla.py [--heads 64 128 8] [--groups forward backward kl dense] [--tokens 4096]

Nothing here decides anything at run time: the library cuts by rule, and this script is how the rules were found. Each
variant is compiled in a process of its own first (one core each), compared with the unfused twin on a few rows, and
timed by the profiler: the mean device time of each kernel over a few calls. The stages of the backward pass are
independent, so one stage at a time is varied.

FLOPs: forward 2 T n K (2 R + Dr), backward 2 T n K (3 (R + Dr) + 2 R), head sums 2 T n K (R + Dr).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mla_attention.fusions.dsa import attention_reference as twins
from mla_attention.fusions.dsa import indexer_kl_dense as dense
from mla_attention.fusions.dsa import indexer_kl_sparse as sparse
from mla_attention.fusions.dsa.sparse_mla_backward import BackwardBlocks, launch_backward
from mla_attention.fusions.dsa.sparse_mla_forward import ForwardBlocks, launch_forward
from mla_attention.fusions.dsa.sparse_tiles import pack_slots

RANK, ROPE, DIM, SCALE = 512, 64, 128, 0.0417
INDEX_HEADS = {64: 32, 128: 64, 8: 32, 16: 32, 32: 32}
CHECKED_ROWS = 24
Variant = tuple[str, int, str, Any]  # group, heads, kernel whose time counts, blocks


def forward_variants(heads: int) -> Iterator[ForwardBlocks | str]:
    if heads >= 64:
        yield "hopper"
        for keys, warps, stages in ((32, 8, 4), (32, 8, 3), (32, 8, 2), (64, 8, 2), (64, 8, 1), (16, 8, 4), (16, 8, 6)):
            yield ForwardBlocks(64, keys, warps, stages)
        for keys, warps, stages in ((32, 8, 2), (64, 8, 2), (32, 4, 2)):
            yield ForwardBlocks(32, keys, warps, stages)
    else:
        for keys, warps, stages in ((32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2), (32, 8, 2), (32, 8, 3), (16, 4, 4)):
            yield ForwardBlocks(16, keys, warps, stages)


def backward_variants(heads: int) -> Iterator[tuple[str, BackwardBlocks]]:
    if heads >= 64:
        base = BackwardBlocks("separate", 64, 32, 8, 2)
        for keys, warps, stages in ((32, 8, 2), (64, 8, 1), (64, 4, 1), (32, 4, 2), (16, 8, 3), (32, 8, 1)):
            yield "score_gradient_kernel", replace(base, keys=keys, warps=warps, stages=stages)
        for keys, stages in ((64, 2), (32, 3), (32, 4), (32, 5), (64, 1)):
            yield "query_gradient_kernel", replace(base, query_keys=keys, query_stages=stages)
        yield "hopper_score_gradient_kernel", BackwardBlocks("hopper", 64, 32, 8, 2)
        yield "total", BackwardBlocks("joint", 64, 32, 8, 2)
        yield "total", BackwardBlocks("joint", 64, 32, 8, 1)
        yield "total", BackwardBlocks("joint", 64, 64, 8, 1)
        yield "total", BackwardBlocks("one_pass", 32, 16, 4, 1)
        yield "total", BackwardBlocks("one_pass", 32, 32, 8, 2)
    else:
        base = BackwardBlocks("joint", 16, 32, 4, 2)
        for keys, warps, stages in ((32, 4, 2), (64, 4, 2), (64, 8, 2), (32, 8, 2), (16, 4, 3)):
            yield "score_gradient_kernel", replace(base, keys=keys, warps=warps, stages=stages)
        yield "total", BackwardBlocks("one_pass", 16, 32, 4, 1)
        yield "total", BackwardBlocks("one_pass", 16, 16, 4, 2)
    for keys, channels, warps, stages in (
        (64, 128, 4, 2),
        (64, 128, 4, 1),
        (64, 128, 4, 3),
        (64, 64, 4, 2),
        (64, 256, 8, 2),
        (128, 128, 8, 2),
        (128, 64, 4, 2),
        (32, 128, 4, 2),
    ):
        yield (
            "key_share_kernel",
            replace(base, share_keys=keys, share_channels=channels, share_warps=warps, share_stages=stages),
        )


def variants(groups: list[str], heads: list[int]) -> list[Variant]:
    found: list[Variant] = []
    for n in heads:
        if "forward" in groups:
            found += [("forward", n, "sparse_mla_forward_kernel", blocks) for blocks in forward_variants(n)]
        if "backward" in groups:
            for kernel, blocks in backward_variants(n):
                found.append(("backward", n, kernel, blocks))
                if kernel == "key_share_kernel" and blocks.share_channels == 128:
                    found.append(("ordered", n, kernel, blocks))
        if "kl" in groups:
            block_heads = min(n, 128) if n >= 16 else 16
            for slots, stages in ((32, 2), (64, 2), (32, 3), (64, 1), (128, 1)):
                for warps in (4, 8):
                    found.append(("kl", n, "head_sums_kernel", sparse.SlotBlocks(block_heads, slots, warps, stages)))
            for kernel in ("slot_scores_kernel", "slot_gradient_kernel"):
                for slots, warps, stages in ((64, 8, 2), (32, 4, 2), (64, 4, 2), (128, 8, 2), (32, 8, 2), (64, 4, 3)):
                    found.append(("kl", n, kernel, sparse.SlotBlocks(INDEX_HEADS[n], slots, warps, stages)))
        if "dense" in groups:
            for rows, keys, warps, stages in ((128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 3), (64, 128, 4, 3)):
                blocks = dense.DenseBlocks(rows, keys, warps, stages)
                found += [("dense", n, kernel, blocks) for kernel in ("dense_lse_kernel", "dense_head_sums_kernel")]
            for rows, keys, warps, stages in ((64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2), (64, 64, 4, 1)):
                blocks = dense.DenseBlocks(rows, keys, warps, stages)
                found.append(("dense", n, "dense_query_gradient_kernel", blocks))
                found.append(("dense", n, "dense_key_gradient_kernel", blocks))
    return found


class Inputs:
    """Random inputs of one head count; the same keys are selected by runs of rows, as a trained indexer does."""

    def __init__(self, heads: int, tokens: int, keys: int, topk: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        self.heads, self.topk = heads, topk
        self.query = normal(tokens, heads, RANK + ROPE).bfloat16()
        self.key = normal(keys, RANK + ROPE).bfloat16()
        self.grad_out = normal(tokens, heads, RANK).bfloat16()
        chosen = [torch.randperm(keys, device="cuda", generator=generator)[:topk] for _ in range(min(64, tokens))]
        self.indices = torch.stack(chosen).sort(-1).values.repeat(-(-tokens // len(chosen)), 1)[:tokens]
        self.slots, self.counts = pack_slots(self.indices)
        self.out, self.lse = launch_forward(self.query, self.key, self.slots, self.counts, SCALE, RANK)
        self.index_q = normal(tokens, INDEX_HEADS[heads], DIM).bfloat16()
        self.index_k = normal(keys, DIM).bfloat16()
        self.weights = normal(tokens, INDEX_HEADS[heads]) * 0.02
        self.gradient = normal(*self.slots.shape) * 1e-3
        self.grad_kl = normal(tokens)
        rows = min(tokens, 1024)
        self.tile = torch.zeros(rows, keys, device="cuda")
        self.end = torch.full((rows,), keys, device="cuda", dtype=torch.int32)
        self.begin = torch.zeros_like(self.end)


def call_of(variant: Variant, x: Inputs) -> Callable[[], Any]:
    group, _, kernel, blocks = variant
    if blocks == "hopper":
        from mla_attention.fusions.dsa.sparse_mla_hopper import launch_forward_hopper

        return lambda: launch_forward_hopper(x.query, x.key, x.slots, x.counts, SCALE, RANK)
    if group == "forward":
        return lambda: launch_forward(x.query, x.key, x.slots, x.counts, SCALE, RANK, blocks=blocks)
    if group in ("backward", "ordered"):
        arguments = (x.query, x.key, x.slots, x.counts, x.out, x.lse, x.grad_out, None, SCALE)
        return lambda: launch_backward(*arguments, blocks=blocks, ordered=group == "ordered")
    if kernel == "head_sums_kernel":
        return lambda: sparse.head_sums_on_slots(x.query, x.key, x.slots, x.counts, x.lse, SCALE, RANK, blocks=blocks)
    indexer = (x.index_q, x.index_k, x.weights)
    if kernel == "slot_scores_kernel":
        return lambda: sparse.scores_on_slots(*indexer, x.slots, x.counts, relu=True, blocks=blocks)
    if kernel == "slot_gradient_kernel":
        return lambda: sparse.indexer_gradient_on_slots(
            *indexer,
            x.gradient,
            x.grad_kl,
            x.slots,
            x.counts,
            relu=True,
            ordered=False,
            scratch_bytes=2**30,
            blocks=blocks,
        )
    rows = x.tile.shape[0]
    if kernel == "dense_lse_kernel":
        return lambda: dense.dense_lse(x.query[:rows], x.key, x.begin, x.end, SCALE, blocks=blocks)
    if kernel == "dense_head_sums_kernel":
        return lambda: dense.dense_head_sums(
            x.query[:rows], x.key, x.begin, x.end, x.lse[:rows], SCALE, x.tile, blocks=blocks
        )
    return lambda: dense.dense_indexer_gradient(
        x.index_q[:rows],
        x.index_k,
        x.weights[:rows],
        x.tile,
        x.grad_kl[:rows],
        x.begin,
        x.end,
        relu=True,
        blocks=(blocks, blocks),
    )


def flops_of(variant: Variant, x: Inputs) -> float:
    """Of the whole call (forward, backward, ordered) or of the one kernel."""
    group, heads, kernel, _ = variant
    pairs = x.query.shape[0] * x.topk
    tile_pairs = x.tile.numel()
    index_heads = INDEX_HEADS[heads]
    return {
        "sparse_mla_forward_kernel": 2.0 * pairs * heads * (2 * RANK + ROPE),
        "head_sums_kernel": 2.0 * pairs * heads * (RANK + ROPE),
        "slot_scores_kernel": 2.0 * pairs * index_heads * DIM,
        "slot_gradient_kernel": 6.0 * pairs * index_heads * DIM,
        "dense_lse_kernel": 2.0 * tile_pairs * heads * (RANK + ROPE),
        "dense_head_sums_kernel": 2.0 * tile_pairs * heads * (RANK + ROPE),
        "dense_query_gradient_kernel": 4.0 * tile_pairs * index_heads * DIM,
        "dense_key_gradient_kernel": 4.0 * tile_pairs * index_heads * DIM,
    }.get(kernel, 2.0 * pairs * heads * (3 * (RANK + ROPE) + 2 * RANK) if group in ("backward", "ordered") else 0.0)


def error_of(variant: Variant, x: Inputs) -> float:
    """Largest relative error of the results on the checked rows against fp64, or 0 where nothing is compared."""
    group = variant[0]
    if group not in ("forward", "backward", "ordered"):
        return 0.0
    query, key = x.query.double().requires_grad_(), x.key.double().requires_grad_()
    out, _ = twins.sparse_mla(query, key, x.indices, SCALE, RANK)
    results: Any = call_of(variant, x)()
    wanted: Any = (out,)
    if group == "forward":
        results = results[:1]
    else:
        wanted = torch.autograd.grad(out, (query, key), x.grad_out.double())
    return max(float((got.double() - want).norm() / want.norm()) for got, want in zip(results, wanted, strict=True))


def kernel_times(call: Callable[[], Any], repetitions: int = 4) -> dict[str, float]:
    """Mean device milliseconds a call of each kernel, and their sum as "total"."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repetitions):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in trace.key_averages():
        if event.self_device_time_total > 0:
            times[event.key[:60]] = event.self_device_time_total / repetitions / 1e3
    times["total"] = sum(times.values())
    return times


def compile_in_worker(variant: Variant) -> str:
    """Fill the compile cache; returns the failure as one line."""
    try:
        inputs = Inputs(variant[1], 4, 4096, 2048)
        call_of(variant, inputs)()
        torch.cuda.synchronize()
    except Exception as error:  # a variant that does not compile is a result
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 128, 8])
    parser.add_argument("--groups", nargs="+", default=["forward", "backward", "kl", "dense"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, default=None, help="JSON of every row")
    arguments = parser.parse_args()
    found = variants(arguments.groups, arguments.heads)
    with ProcessPoolExecutor(arguments.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        failures = list(pool.map(compile_in_worker, found, chunksize=1))
    rows = []
    for heads in arguments.heads:
        small = Inputs(heads, CHECKED_ROWS, 4096, 512)
        inputs = Inputs(heads, arguments.tokens, arguments.keys, arguments.topk)
        for variant, failure in zip(found, failures, strict=True):
            group, variant_heads, kernel, blocks = variant
            if variant_heads != heads:
                continue
            row: dict[str, Any] = {"group": group, "heads": heads, "kernel": kernel, "blocks": str(blocks)}
            try:
                if failure:
                    raise RuntimeError(failure)
                row["error"] = error_of(variant, small)
                if not row["error"] < 0.02:
                    raise RuntimeError(f"wrong: error {row['error']:.1e}")
                row["ms"] = kernel_times(call_of(variant, inputs))
                whole = group in ("forward", "backward", "ordered") or kernel not in row["ms"]
                rate = flops_of(variant, inputs) / row["ms"]["total" if whole else kernel]
                row["tflops"] = rate / 1e9
                detail = " ".join(
                    f"{name.removesuffix('_kernel')}={ms:.3f}" for name, ms in row["ms"].items() if ms > 0.02
                )
                print(f"{group} n={heads} {kernel}: {row['tflops']:.0f} TFLOP/s {detail}\n    {blocks}", flush=True)
            except Exception as error:  # the other variants go on
                row["failure"] = " ".join(str(error).split())[:200]
                print(f"{group} n={heads} {kernel}: {row['failure']}\n    {blocks}", flush=True)
            rows.append(row)
        del small, inputs
        torch.cuda.empty_cache()
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
