"""What starting costs: first fused call with a cold Triton cache, recompilations over token counts, import time.

Every probe runs in a fresh process with its own empty ``TRITON_CACHE_DIR``. Kernels compiled are counted as entries of
that directory, so a recompilation cannot hide in a memory cache.

    python benchmarks/startup.py [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import Failure, Record, Timing, add_output_arguments, render_table, require_cuda, target_text

DEVICE = "cuda"
TOKEN_COUNTS = (
    *(1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 48, 64, 100, 127, 128, 129, 255, 256, 500, 512),
    *(777, 1000, 1023, 1024, 1025, 2000, 2047, 2048, 3333, 4096),
)
LIMITS = {"first_call_s": 2.0, "recompilations": 0.0, "import_s": 0.3}


def _kernel_count() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/__grp__*.json")))


def _inputs(tokens: int, packed: bool) -> dict[str, Any]:
    lead = (tokens,) if packed else (tokens, 1)
    angle = torch.rand(tokens, 1, 1, 64, device=DEVICE)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
    middle = tokens // 3
    return {
        "q": new(*lead, 8, 256),
        "kv": new(*lead, 8, 448),
        "k_pe": new(*lead, 1, 64),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "cu": torch.tensor([0, middle, tokens], device=DEVICE, dtype=torch.int32) if packed else None,
    }


def _step(tokens: int, packed: bool) -> None:
    """One forward and backward of the query rotation and the key/value split, GLM-5 widths, 8 heads."""
    from mla_attention.fusions import fused_apply_mla_rope_for_kv, fused_apply_mla_rope_for_q

    x = _inputs(tokens, packed)
    leaves = [x[name].requires_grad_() for name in ("q", "kv", "k_pe")]
    q = fused_apply_mla_rope_for_q(leaves[0] * 1, x["cos"], x["sin"], 192, 64, x["cu"])
    key, value = fused_apply_mla_rope_for_kv(leaves[1], leaves[2], x["cos"], x["sin"], 64, 192, 256, x["cu"])
    torch.autograd.grad((q, key, value), leaves, (torch.ones_like(q), torch.ones_like(key), torch.ones_like(value)))
    _wait()


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def probe_first_call() -> dict[str, float]:
    """Seconds of the first and second call of the query kernel, and of the first whole step."""
    import mla_attention.fusions as fusions

    x = _inputs(4096, packed=False)
    _wait()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        fusions.fused_apply_mla_rope_for_q(x["q"], x["cos"], x["sin"], 192, 64)
        _wait()
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    _step(4096, packed=False)
    return {
        "first_call_s": seconds[0],
        "second_call_s": seconds[1],
        "first_step_s": time.perf_counter() - start,
        "kernels": float(_kernel_count()),
    }


def probe_compiles() -> dict[str, float]:
    """Kernels compiled by one large and one small step of each layout, and recompilations over all token counts."""
    for packed in (False, True):
        _step(4096, packed)
        _step(7, packed)
    before = _kernel_count()
    for packed in (False, True):
        for tokens in TOKEN_COUNTS:
            _step(tokens, packed)
    return {"kernels": float(before), "recompilations": float(_kernel_count() - before)}


def probe_import() -> dict[str, float]:
    """Seconds that ``import mla_attention`` adds to an ``import torch`` already done."""
    start = time.perf_counter()
    __import__("mla_attention")
    return {"import_s": time.perf_counter() - start}


PROBES = {"first_call": probe_first_call, "compiles": probe_compiles, "import": probe_import}


def run_probe(name: str, timeout: float = 300.0) -> dict[str, float]:
    """Run one probe in a fresh process with an empty Triton cache.

    Raises:
        RuntimeError: the process failed; the message is its last line.
    """
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--probe", name],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def add_rows(record: Record) -> list[dict[str, Any]]:
    """Run every probe and append one row each; a probe that fails becomes a failed row."""
    added = []
    for name in PROBES:
        try:
            values = run_probe(name)
        except (RuntimeError, subprocess.SubprocessError, json.JSONDecodeError, OSError) as error:
            added.append(record.add(f"startup/{name}", "ours", Failure("error", f"{type(error).__name__}: {error}")))
            continue
        within = all(values[key] <= limit for key, limit in LIMITS.items() if key in values)
        seconds = values.get("first_call_s", values.get("import_s", 0.0))
        timing = Timing(seconds * 1e6, seconds * 1e6, seconds * 1e6, seconds * 1e6, 1)
        added.append(record.add(f"startup/{name}", "ours", timing, **values, meets_target=within))
    return added


def table(rows: list[dict[str, Any]]) -> str:
    """Render the startup rows."""
    body = []
    for row in rows:
        shown = {k: v for k, v in row.items() if k.endswith("_s") or k in ("kernels", "recompilations")}
        text = row.get("message") or ", ".join(f"{k} {v:.3g}" for k, v in shown.items())
        body.append([row["row"], text, target_text(row)])
    return render_table(["row", "values", "target"], body)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="first call, recompilations, import time")
    parser.add_argument("--probe", choices=PROBES, help="run one probe in this process and print JSON")
    add_output_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.probe:
        print(json.dumps(PROBES[arguments.probe]()))
        return 0
    require_cuda()
    record = Record("startup", arguments.tag)
    rows = add_rows(record)
    path = record.write(arguments.out)
    print(f"{table(rows)}\n{path}")
    return record.exit_status()


if __name__ == "__main__":
    raise SystemExit(main())
