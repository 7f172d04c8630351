"""Compiles what the sparse attention launchers launch, for absent GPUs. Called in processes of their own."""

import re
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

from tests.aot.harness import Target, compile_kernel

PRESETS = {"glm5": (64, 32), "deepseek_v32": (128, 64), "tp8": (8, 32)}  # attention heads, indexer heads
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, "gfx942": 64 * 1024}
RANK, ROPE, DIM, TOKENS, KEYS, SLOTS, SCALE = 512, 64, 128, 4, 300, 256, 0.1
READ_BACK_ON_BLACKWELL = 40 * 1024


class Recorder:
    """Compiles every launch for a target instead of running it."""

    def __init__(self, target: Target) -> None:
        self.target = tuple(target)
        self.facts: dict[str, dict] = {}
        self.ptx: dict[str, str] = {}

    def __enter__(self) -> "Recorder":
        import triton

        from mla_attention.fusions.dsa import indexer_kl_dense, indexer_kl_sparse, sparse_mla, sparse_mla_forward

        shipped = triton.JITFunction.run

        def run(jit_fn, *args, grid, warmup, **options):
            if warmup:
                return shipped(jit_fn, *args, grid=grid, warmup=True, **options)
            compiled = compile_kernel(jit_fn, args, self.target, options.pop("num_warps"), **options)
            name = jit_fn.__name__
            while name in self.facts:
                name += "'"
            self.facts[name] = {"spills": compiled.spills, "shared": compiled.shared}
            if "ptx" in compiled.kernel.asm:
                self.ptx[name] = compiled.ptx
                self.facts[name] |= {
                    "wgmma": len(re.findall(r"wgmma\.mma_async", compiled.ptx)),
                    "gathers": len(re.findall(r"cp\.async\.cg", compiled.ptx)),
                    "wide atomics": len(re.findall(r"red\S*add\S*v4\S*f32|atom\S*add\S*v4\S*f32", compiled.ptx)),
                    "atomics": len(re.findall(r"\b(?:red|atom)\.(?:global|relaxed)\S*add", compiled.ptx)),
                }
            return None

        limit = SHARED_BYTES[self.target[1]]
        if self.target == ("cuda", 100):
            limit -= READ_BACK_ON_BLACKWELL
        self._stack = ExitStack()
        self._stack.enter_context(mock.patch.object(triton.JITFunction, "run", run))
        for module in (sparse_mla, sparse_mla_forward, indexer_kl_sparse, indexer_kl_dense):
            self._stack.enter_context(mock.patch.object(module, "shared_memory", return_value=limit))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def attention(heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """query, key, slots, counts"""
    return (
        torch.empty(TOKENS, heads, RANK + ROPE, dtype=dtype),
        torch.empty(KEYS, RANK + ROPE, dtype=dtype),
        torch.zeros(TOKENS, SLOTS, dtype=torch.int32),
        torch.zeros(TOKENS, dtype=torch.int32),
    )


def compile_sparse_mla(target: Target, preset: str, dtype: str = "bfloat16") -> dict:
    """Facts of the kernels of sparse_mla, with atomics and without."""
    from mla_attention.fusions.dsa import sparse_mla
    from mla_attention.fusions.dsa.sparse_mla_forward import launch_forward

    heads = PRESETS[preset][0]
    inputs = attention(heads, getattr(torch, dtype))
    with Recorder(target) as recorder:
        out, lse = launch_forward(*inputs, SCALE, RANK)
        for ordered in (False, True):
            sparse_mla._backward._init_fn(*inputs, out, lse, out, None, SCALE, ordered)
    return recorder.facts


def compile_hopper(preset: str) -> dict:
    """Facts of the Gluon kernels, and ptxas' complaints about their products."""
    import triton

    from mla_attention.fusions.dsa.sparse_mla_backward import BackwardBlocks, launch_backward
    from mla_attention.fusions.dsa.sparse_mla_hopper import launch_forward_hopper

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    inputs = attention(PRESETS[preset][0], torch.bfloat16)
    with Recorder(("cuda", 90)) as recorder:
        out, lse = launch_forward_hopper(*inputs, SCALE, RANK)
        blocks = BackwardBlocks("hopper", 64, 32, 8, 2)
        launch_backward(*inputs, out, lse, out, None, SCALE, blocks=blocks, ordered=False)
    for name, ptx in recorder.ptx.items():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(ptx)
            command = [ptxas, "-v", "--gpu-name", "sm_90a", source, "-o", Path(folder) / "kernel.cubin"]
            report = subprocess.run(command, capture_output=True, text=True, check=True)
        recorder.facts[name]["serialised"] = "serialized" in report.stdout + report.stderr
    return recorder.facts


def compile_indexer_kl(target: Target, preset: str, dtype: str = "bfloat16") -> dict:
    """Facts of the kernels of indexer_kl, on selected keys and on all keys."""
    from mla_attention.fusions.dsa import indexer_kl_dense as dense
    from mla_attention.fusions.dsa import indexer_kl_sparse as sparse
    from mla_attention.fusions.dsa.kl_rows import kl_rows

    heads, index_heads = PRESETS[preset]
    kind = getattr(torch, dtype)
    query, key, slots, counts = attention(heads, kind)
    lse, rows = torch.empty(TOKENS, heads), torch.empty(TOKENS, SLOTS)
    indexer = torch.empty(TOKENS, index_heads, DIM, dtype=kind), torch.empty(KEYS, DIM, dtype=kind)
    indexer = (*indexer, torch.empty(TOKENS, index_heads))
    with Recorder(target) as recorder:
        sparse.head_sums_on_slots(query, key, slots, counts, lse, SCALE, RANK)
        sparse.scores_on_slots(*indexer, slots, counts, relu=True)
        for ordered in (False, True):
            sparse.indexer_gradient_on_slots(
                *indexer, rows, counts.float(), slots, counts, relu=True, ordered=ordered, scratch_bytes=2**30
            )
        kl_rows(rows, rows, counts, counts, overwrite_scores=True)
        all_keys = torch.empty(TOKENS, KEYS)
        dense.dense_lse(query, key, counts, counts, SCALE)
        dense.dense_head_sums(query, key, counts, counts, lse, SCALE, all_keys)
        dense.dense_indexer_gradient(*indexer, all_keys, counts.float(), counts, counts, relu=True)
    return recorder.facts


def count_binaries(token_counts: list[int]) -> int:
    """Kernels that the calls of a growing sequence would compile beyond those of the first call."""
    import triton

    from mla_attention.fusions.dsa import sparse_mla
    from mla_attention.fusions.dsa.sparse_mla_forward import launch_forward

    keys = set()

    def run(jit_fn, *args, grid, warmup, **options):
        bound = [
            (argument.dtype, argument.data_ptr() % 16 == 0) if isinstance(argument, torch.Tensor) else argument % 16
            for argument in args
            if not isinstance(argument, float)
        ]
        keys.add((jit_fn.__name__, str(bound), str(sorted(options.items()))))

    with mock.patch.object(triton.JITFunction, "run", run):
        for tokens in token_counts:
            query = torch.zeros(tokens, 8, RANK + ROPE, dtype=torch.bfloat16)
            key = torch.zeros(tokens, RANK + ROPE, dtype=torch.bfloat16)
            slots = torch.zeros(tokens, SLOTS, dtype=torch.int32)
            counts = torch.zeros(tokens, dtype=torch.int32)
            out, lse = launch_forward(query, key, slots, counts, SCALE, RANK)
            sparse_mla._backward._init_fn(query, key, slots, counts, out, lse, out, None, SCALE, False)
            if tokens == token_counts[0]:
                first = len(keys)
    return len(keys) - first
