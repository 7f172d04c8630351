"""Compile kernels ahead of time for GPUs that are not there, in processes of their own.

A process either interprets kernels or compiles them, so a test that runs under the interpreter asks `in_fresh_process`
to call a function that uses `compile_kernel` and returns facts as JSON.
"""

import atexit
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
# Spills and the choice of instructions are asserted for the Triton that the kernels were measured with; what another
# makes of them is not a fault of theirs. That they compile, and fit, is asserted for every Triton.
MEASURED_TRITON = importlib.metadata.version("triton").startswith("3.6.")
Target = tuple[str, int | str]
CUDA_TARGETS: tuple[Target, ...] = (("cuda", 80), ("cuda", 90), ("cuda", 100))
TARGETS: tuple[Target, ...] = (*CUDA_TARGETS, ("hip", "gfx942"))


class _StubDriver:
    """Stands where Triton expects the driver of a real device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one target."""

    kernel: Any

    @property
    def ptx(self) -> str:
        """NVIDIA assembly before ptxas."""
        return self.kernel.asm["ptx"]

    @property
    def amdgcn(self) -> str:
        """AMD assembly."""
        return self.kernel.asm["amdgcn"]

    @property
    def ttgir(self) -> str:
        """Triton's GPU intermediate representation, with its layouts."""
        return self.kernel.asm["ttgir"]

    @property
    def shared(self) -> int:
        """Shared memory in bytes."""
        return self.kernel.metadata.shared

    @cached_property
    def _usage(self) -> dict[str, int]:
        import triton

        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self.kernel.asm["cubin"])
            cubin.flush()
            report = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
        return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}

    @property
    def registers(self) -> int:
        """Registers a thread."""
        if "cubin" in self.kernel.asm:
            return self._usage["REG"]
        return int(re.search(r"\.vgpr_count:\s+(\d+)", self.amdgcn)[1])  # type: ignore[index]

    @property
    def spills(self) -> int:
        """Local memory in bytes a thread (NVIDIA), or spilled registers (AMD): 0 is what kernels aim for."""
        if "cubin" in self.kernel.asm:
            return self._usage["STACK"] + self._usage["LOCAL"]
        return sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", self.amdgcn))

    @property
    def memory_order(self) -> list[str]:
        """'load' and 'store' of global memory, 'barrier' of a program, 'warp_barrier', in the order of the assembly."""
        if "ptx" in self.kernel.asm:
            text, load, store = self.ptx, r"ld\.global", r"st\.global"
            barrier, warp_barrier = r"bar\.sync|barrier\.(?:cta\.)?sync", r"bar\.warp\.sync"
        else:
            text, load, store = self.amdgcn, "(?:buffer|global)_load", "(?:buffer|global)_store"
            barrier, warp_barrier = "s_barrier", "wave_barrier"
        kinds = {"load": load, "store": store, "barrier": barrier, "warp_barrier": warp_barrier}
        pattern = "|".join(f"(?P<{kind}>{expression})" for kind, expression in kinds.items())
        return [str(match.lastgroup) for match in re.finditer(rf"\b(?:{pattern})", text)]


def compile_kernel(
    jit_fn: Any,
    args: tuple[Any, ...],
    target: Target = ("cuda", 90),
    num_warps: int = 4,
    num_stages: int = 3,
    **constexprs: Any,
) -> Compiled:
    """Compile `jit_fn` with the specialisation that a launch with these arguments would have.

    Args:
        jit_fn: a `triton.jit` function.
        args: positional arguments as a launch takes them; CPU tensors stand for device tensors.
        target: ("cuda", compute capability) or ("hip", architecture).
        num_warps: warps a program.
        num_stages: software pipelining depth.
        constexprs: constexpr and keyword arguments, and options such as enable_fp_fusion.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels cannot be compiled in a process that interprets them: use in_fresh_process")
    backend, arch = target
    triton.runtime.driver.set_active(_StubDriver(GPUTarget(backend, arch, 32 if backend == "cuda" else 64)))
    while not isinstance(jit_fn, triton.JITFunction):
        jit_fn = jit_fn.fn
    jit_fn.device_caches.clear()  # else a second target is handed the first one's binary
    return Compiled(jit_fn.warmup(*args, grid=(1,), num_warps=num_warps, num_stages=num_stages, **constexprs))


def stop_at_ptx() -> None:
    """Skip ptxas for the rest of the process, for facts that the PTX alone tells.

    The cache is a temporary one from then on: a real launch must never find such a kernel.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    folder = tempfile.TemporaryDirectory(prefix="triton-ptx-")
    atexit.register(folder.cleanup)
    os.environ["TRITON_CACHE_DIR"] = folder.name
    CUDABackend.make_cubin = lambda *_: b""


def without_debug_lines(ptx: str) -> str:
    """PTX without line numbers, comments, debug sections and names, for comparing two kernels."""
    code = re.split(r"^\s*\.(?:file|section)\b", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    code = re.sub(r"//.*|^\s*\.loc\b.*|\$L__tmp\d+:", "", code, flags=re.MULTILINE)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


def in_fresh_process(function: str, env: dict[str, str] | None = None, timeout: float = 600, **arguments: Any) -> Any:
    """Call "package.module:function" with JSON arguments in a new process that compiles instead of interpreting.

    Args:
        function: what to call; its result must be JSON.
        env: environment variables to set in addition.
        timeout: seconds after which the process is killed.
        arguments: keyword arguments of the function.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | (env or {})
    command = [sys.executable, "-m", "tests.aot.harness", function, json.dumps(arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{function} failed in its process:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _main(function: str, arguments: str) -> None:
    module, name = function.split(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(arguments))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
