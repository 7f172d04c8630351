"""Compiles the selection kernels as launches would, for GPUs that are not there. Called in processes of their own."""

from dataclasses import asdict

import torch

from tests.aot.harness import Target, compile_kernel

PRESETS = {"glm5": (32, 128, 2048), "deepseek_v32": (64, 128, 2048), "odd": (3, 96, 100)}  # Hi, Di, K


def architecture(target: Target) -> str:
    """The name that `choose_score_blocks` knows a target by."""
    return "hip" if target[0] == "hip" else "hopper" if target[1] == 90 else "cuda"


def compile_scores(target: Target, preset: str, key_range: int, dtype: str, units: int = 12345) -> dict:
    """Facts of the score kernel."""
    from mla_attention.fusions.dsa import indexer_scores as kernels

    heads, width, _ = PRESETS[preset]
    kind = getattr(torch, dtype)
    blocks = kernels.choose_score_blocks(kind, heads, width, architecture(target))
    limits = torch.empty(64, dtype=torch.int32) if key_range == 2 else None
    compiled = compile_kernel(
        kernels._indexer_scores_kernel,
        (
            torch.empty(64, heads, width, dtype=kind),
            torch.empty(64, width, dtype=kind),
            torch.empty(64, heads),
            limits,
            limits,
            torch.empty(64, 64),
            *(units, units, 0, heads * width, width, width, heads, units),
        ),
        tuple(target),
        blocks.num_warps,
        HEADS=heads,
        DIM=width,
        BLOCK_DIM=128,
        BLOCK_ROWS=blocks.rows,
        BLOCK_KEYS=blocks.keys,
        GROUP=blocks.group,
        RANGE=key_range,
        ALIGN=4,
        RELU=True,
        FILL=key_range == 1,
        UPCAST=False,
        STAGES=blocks.num_stages,
    )
    return {"spills": compiled.spills, "shared": compiled.shared, "blocks": asdict(blocks)}


def compile_topk(target: Target, preset: str, key_range: int, units: int = 12345, keys: int = 32768) -> dict:
    """Facts of the three top-k kernels, the sampled one as for rows of so many keys."""
    from mla_attention.fusions.dsa import topk_select as kernels
    from mla_attention.fusions.dsa.topk_sampled import topk_sampled_kernel

    topk = PRESETS[preset][2]
    blocks = kernels.choose_topk_blocks(topk)
    assert blocks is not None
    options = {"maxnreg": blocks.max_registers} if target[0] == "cuda" else {}
    limits = torch.empty(64, dtype=torch.int32) if key_range == 2 else None
    matrix, out, index = torch.empty(64, 64), torch.empty(64, 64, dtype=torch.int64), torch.empty(64, dtype=torch.int32)
    shape = (units, units, units, 0, topk, topk)
    sample, group = kernels.choose_sample(blocks, topk, keys)
    sampled = compile_kernel(
        topk_sampled_kernel,
        (matrix, limits, limits, out, index, index, index, *shape, units),
        tuple(target),
        blocks.num_warps,
        RANGE=key_range,
        ALIGN=4,
        BLOCK=blocks.mark_block,
        WORDS=1024,
        CAPACITY=blocks.capacity,
        SAMPLE=sample,
        GROUP=group,
        **options,
    )
    buffered = compile_kernel(
        kernels._topk_buffered_kernel,
        (matrix, limits, limits, out, index, out, *shape, blocks.capacity),
        tuple(target),
        blocks.num_warps,
        RANGE=key_range,
        BLOCK=min(2048, blocks.capacity // 2),
        CAPACITY=blocks.capacity,
        TURNS=128,
        **options,
    )
    bisected = compile_kernel(
        kernels._topk_bisected_kernel,
        (matrix, limits, limits, out, *shape),
        tuple(target),
        8,
        RANGE=key_range,
        BLOCK=4096,
    )
    text = "" if target[0] == "hip" else sampled.ptx + buffered.ptx + bisected.ptx
    return {
        "wide loads": "" if target[0] == "hip" else sampled.ptx.count("ld.global.v4"),
        "flushes denormals in comparisons": "setp.gt.ftz" in text or "setp.gtu.ftz" in text,
        "atomics": text.count("atom.") + text.count("red.global"),
        "votes": text.count("redux.sync"),
        "shared": sampled.shared,
        "scatters through shared memory": sampled.ttgir.count("-> tensor<4096xi64"),
    }


def compile_ranges(target: Target) -> int:
    """Bytes spilled by the kernel that finds each row's keys."""
    from mla_attention.fusions.dsa.key_ranges_kernel import _key_ranges_kernel

    offsets, rows = torch.empty(9, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    arguments = (rows.long(), offsets, rows, rows, 64, 64, 9, 8)
    return compile_kernel(_key_ranges_kernel, arguments, tuple(target), BLOCK=1024).spills


def compile_all(target: Target) -> dict:
    """Facts of every kernel for one target; the presets share their top-k."""
    return {
        "ranges": compile_ranges(target),
        "scores": {
            "glm5": compile_scores(target, "glm5", 1, "bfloat16"),
            "glm5 packed": compile_scores(target, "glm5", 2, "bfloat16"),
            "deepseek_v32 packed": compile_scores(target, "deepseek_v32", 2, "bfloat16"),
            "odd packed": compile_scores(target, "odd", 2, "float16"),
            "glm5 fp32": compile_scores(target, "glm5", 1, "float32"),
        },
        "topk": {
            "presets": compile_topk(target, "glm5", 1),
            "presets packed": compile_topk(target, "glm5", 2),
            "presets long": compile_topk(target, "glm5", 1, keys=131072),
            "odd": compile_topk(target, "odd", 1),
        },
    }


def count_binaries(counts: list[int]) -> int:
    """Binaries that launches with these row and key counts would need, of all kernels."""
    from mla_attention.fusions.dsa import indexer_scores, topk_sampled, topk_select

    kernels = (
        indexer_scores._indexer_scores_kernel,
        topk_select._topk_buffered_kernel,
        topk_sampled.topk_sampled_kernel,
    )
    seen: set[str] = set()
    for units in counts:
        compile_scores(("cuda", 90), "odd", 1, "bfloat16", units)
        compile_topk(("cuda", 90), "odd", 1, units)
        for kernel in kernels:
            seen |= {str(key) for cache in kernel.device_caches.values() for key in cache[0]}
    return len(seen)
