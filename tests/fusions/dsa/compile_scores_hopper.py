"""Compiles the Gluon score kernel as its launcher launches it, for an absent Hopper. Called in a process of its own."""

import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import torch

from tests.aot.harness import Compiled, compile_kernel


def compile_launch(heads: int, width: int = 128, dtype: str = "bfloat16", **options: object) -> Compiled:
    """The kernel of one launch; options are the launcher's, `packed` gives it ranges."""
    import triton

    from mla_attention.fusions.dsa import indexer_scores_hopper as kernels

    shipped, found = triton.JITFunction.run, []

    def run(jit_fn, *args, grid, warmup, **constants):
        if warmup:
            return shipped(jit_fn, *args, grid=grid, warmup=True, **constants)
        found.append(compile_kernel(jit_fn, args, ("cuda", 90), constants.pop("num_warps"), **constants))

    kind, rows, keys = getattr(torch, dtype), 100, 300
    q, k = torch.empty(rows, heads, width, dtype=kind), torch.empty(keys, width, dtype=kind)
    limits = {"begin": torch.zeros(rows, dtype=torch.int32), "end": torch.zeros(rows, dtype=torch.int32)}
    ranges = limits if options.pop("packed", False) else {}
    with mock.patch.object(triton.JITFunction, "run", run):
        kernels.launch_scores_hopper(
            q, k, torch.empty(rows, heads), torch.empty(rows, keys), **{"relu": True, **ranges, **options}
        )
    return found[0]


def machine_code(compiled: Compiled) -> tuple[list[str], str]:
    """Instructions of the binary, and what ptxas says about it."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.ptx)
        command = [tools / "ptxas", "-v", "--gpu-name", "sm_90a", ptx, "-o", cubin]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
        cubin.write_bytes(compiled.kernel.asm["cubin"])
        sass = subprocess.run([tools / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", sass), report.stdout + report.stderr


def events(instructions: list[str]) -> str:
    """Events in order: P a product's last step, W/w wait for all/all but one, M a step of the sum, m a spilled word."""
    letters = []
    for line in instructions:
        if "HGMMA" in line and "gsb0" in line:
            letters.append("P")
        elif "WARPGROUP.DEPBAR" in line:
            letters.append("W" if line.rstrip().endswith("0x0") else "w")
        elif "FMNMX" in line:
            letters.append("M")
        elif re.search(r"\b(?:LDL|STL)\b", line):
            letters.append("m")
    return "".join(letters)


def compile_one(**arguments: object) -> dict:
    """Facts of one launch."""
    compiled = compile_launch(**arguments)
    instructions, report = machine_code(compiled)
    order = events(instructions)
    start = next(i for i, line in enumerate(instructions) if "UTMALDG" in line)
    copying = instructions[start - 40 : start + 40]
    inside = [
        order[first.start() : last.end()]
        for first, last in zip(re.finditer("P", order), list(re.finditer("P", order))[1:], strict=False)
    ]
    return {
        "serialised": "serialized" in report,
        "shared": compiled.shared,
        "registers": compiled.registers,
        "stack": compiled.spills,
        "spills between products": sum(piece.count("m") for piece in inside if "W" not in piece),
        "order": re.sub(r"M+", lambda run: f"M{len(run[0])}", order),
        "wgmma": len(re.findall(r"wgmma\.mma_async", compiled.ptx)),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor", compiled.ptx)),
        "wide stores": len(re.findall(r"st\.global\.v2", compiled.ptx)),
        "registers of the copying warp": max(
            int(number) for line in copying for number in re.findall(r"\bR(\d+)\b", line)
        ),
    }


def compile_all(cases: dict[str, dict]) -> dict:
    """Facts of several launches."""
    return {name: compile_one(**arguments) for name, arguments in cases.items()}


def arithmetic(heads: int) -> list[list[str]]:
    """The instructions that make a score, of this kernel and of the portable one."""
    from tests.fusions.dsa.compile_selection import compile_scores

    kernels = [compile_launch(heads)]

    def keep(*arguments: object, **options: object) -> Compiled:
        kernels.append(compile_kernel(*arguments, **options))
        return kernels[-1]

    with mock.patch("tests.fusions.dsa.compile_selection.compile_kernel", keep):
        compile_scores(("cuda", 90), "glm5", 1, "bfloat16")
    found = [re.findall(r"\b(?:wgmma\.mma_async|max\.NaN|fma\.rn)\S*", kernel.ptx) for kernel in kernels]
    return [sorted(set(instructions)) for instructions in found]
