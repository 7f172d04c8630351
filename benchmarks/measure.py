"""How every benchmark here measures: one harness for timing, ceilings, memory, correctness gates, the JSON record.

Timing. Each repetition first reads a buffer larger than the L2 cache (the lines it leaves are clean, so no write-back
of old data is charged to the variant), then keeps the device busy for a moment so that the host has queued the
measured call before the device reaches it; CUDA events stand directly around the call. The variants that are compared
take turns within one run, so that clock and temperature drift falls on all of them alike. The median is reported.

Ceilings. A large device-to-device copy (bytes read plus bytes written) and a large bf16 matrix product, both on random
data and in the same run as the measurements that are divided by them.

Rows. A row that is wrong is marked ``wrong`` and is not timed; a row that raises is marked ``error`` with the message;
the run goes on, and :meth:`Record.exit_status` says so at the end.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1
STATUSES = ("ok", "wrong", "error", "skipped")
_FLUSH_BYTES = 2**29  # at least four times the L2 of any current GPU
_LEAD_US = 300.0  # how long the device is kept busy, at least, while the host queues a call
_LEAD_MARGIN = 1.5  # over the time that the host was seen to need
_LEAD_MOST_US = 50e3
_CYCLES_PER_US = 2000  # of the busy wait, at about 2 GHz


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one variant, in microseconds."""

    us: float
    low_us: float
    high_us: float
    host_us: float
    repetitions: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a variant has no timing."""

    status: str
    message: str


def describe(error: BaseException) -> str:
    """Return an exception as one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def require_cuda() -> None:
    """Stop with exit status 2 and one line where there is no CUDA device.

    Raises:
        SystemExit: no CUDA device.
    """
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA device (use --list to see the rows and their byte and FLOP counts)")
        raise SystemExit(2)


def release_memory() -> None:
    """Give cached device memory back between rows."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Lazy:
    """A call that is built at its first use, so that building it can fail like the call itself."""

    def __init__(self, build: Callable[[], Callable[[], Any]]) -> None:
        self._build = build
        self._call: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        if self._call is None:
            self._call = self._build()
        return self._call()


def lead_us(host_us: float) -> float:
    """Return for how long the device waits before a call that the host needs ``host_us`` to queue.

    Long enough that no kernel of the call waits for the host: what is timed is the device. In training the host runs
    ahead in the same way, as long as its time (``host_us`` of a :class:`Timing`) is below the device's.
    """
    return min(max(_LEAD_US, _LEAD_MARGIN * host_us), _LEAD_MOST_US)


class Stopwatch:
    """Cold-L2, event-based, interleaved timing of device work on the current CUDA device.

    A call starts once the host has had time to queue all of it (:func:`lead_us`); the host's time is kept apart.
    """

    def __init__(self, flush_bytes: int = _FLUSH_BYTES) -> None:
        self._buffer = torch.randn(flush_bytes // 4, device="cuda")

    def _once(self, call: Callable[[], object], lead: float) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._buffer.sum()
        torch.cuda._sleep(int(lead * _CYCLES_PER_US))
        host = time.perf_counter()
        start.record()
        call()
        end.record()
        host = time.perf_counter() - host
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3, host * 1e6

    def measure(
        self,
        variants: Mapping[str, Callable[[], object]],
        *,
        seconds: float = 0.5,
        warmup: int = 2,
        least: int = 7,
        most: int = 60,
    ) -> dict[str, Timing | Failure]:
        """Time the variants in turns and return a timing or the failure of each.

        Args:
            variants: name -> call without arguments; each call does the same work every time.
            seconds: device time to spend on all variants together, roughly.
            warmup: untimed calls of each variant (compilation, autotuning, allocator).
            least, most: bounds of the number of repetitions.

        Returns:
            name -> :class:`Timing`, or :class:`Failure` when the variant raised.
        """
        failures: dict[str, Failure] = {}
        estimate: dict[str, float] = {}
        leads: dict[str, float] = {}
        for name, call in variants.items():
            try:
                for _ in range(warmup):
                    call()
                torch.cuda.synchronize()
                estimate[name], host = self._once(call, _LEAD_US)
                leads[name] = lead_us(host)
            except Exception as error:  # a failing peer is a result, not the end of the run
                failures[name] = Failure("error", describe(error))
                release_memory()
        one_round = sum(estimate.values()) + sum(leads.values()) + 200.0 * len(estimate)
        repetitions = int(min(most, max(least, seconds * 1e6 / max(one_round, 1.0))))
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in estimate}
        for _ in range(repetitions):
            for name in list(samples):
                try:
                    samples[name].append(self._once(variants[name], leads[name]))
                except Exception as error:  # as above: recorded, and the others go on
                    failures[name] = Failure("error", describe(error))
                    del samples[name]
                    release_memory()
        result: dict[str, Timing | Failure] = {}
        for name in variants:
            result[name] = failures[name] if name in failures else summarise(samples[name])
        return result

    def copy_rate(self, size: int = 2**32) -> float:
        """Return the device copy rate in bytes per second, counting bytes read plus bytes written."""
        source = torch.randn(size // 4, device="cuda")
        target = torch.empty_like(source)
        timing = _timing(self.measure({"copy": partial(target.copy_, source)}, seconds=0.1, most=20)["copy"])
        return 2 * size / (timing.us * 1e-6)

    def matmul_rate(self, width: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the rate of a ``width``-cubed matrix product on random data in FLOP per second."""
        a, b = (torch.randn(width, width, device="cuda", dtype=dtype) for _ in range(2))
        call = partial(torch.mm, a, b, out=torch.empty_like(a))
        timing = _timing(self.measure({"matmul": call}, seconds=0.2, warmup=4, most=30)["matmul"])
        return 2 * width**3 / (timing.us * 1e-6)


def summarise(samples: Sequence[tuple[float, float]]) -> Timing:
    """Return the medians and the 10th and 90th percentile of (device us, host us) samples."""
    device = sorted(sample[0] for sample in samples)
    host = statistics.median(sample[1] for sample in samples)
    low, high = (device[min(len(device) - 1, int(q * len(device)))] for q in (0.1, 0.9))
    return Timing(statistics.median(device), low, high, host, len(device))


def _timing(result: Timing | Failure) -> Timing:
    if isinstance(result, Failure):
        raise RuntimeError(result.message)
    return result


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """Return the peak of allocated device memory during ``call`` minus what was allocated before it, in bytes."""
    release_memory()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return peak - before


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``|actual - expected| / |expected|`` (Frobenius norms in fp64, in slices; NaN stays NaN)."""
    if actual.shape != expected.shape:
        raise ValueError(f"actual has shape {tuple(actual.shape)}, expected has {tuple(expected.shape)}")
    difference = total = 0.0
    left, right = actual.detach().reshape(-1), expected.detach().reshape(-1)
    for a, b in zip(left.split(2**26), right.split(2**26), strict=True):
        b = b.double()
        difference += float((a.double() - b).square().sum())
        total += float(b.square().sum())
    if total == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return (difference / total) ** 0.5


def gate(
    check: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]], tolerance: float
) -> tuple[Failure | None, float]:
    """Run a correctness check before timing.

    Args:
        check: returns (actual, expected) pairs on fresh random inputs.
        tolerance: largest relative error that passes; NaN never does.

    Returns:
        (None, error) when it passes, else (the failure, error); the error is the largest of the pairs.
    """
    try:
        errors = [relative_error(actual, expected) for actual, expected in check()]
    except Exception as error:  # recorded as the row's error
        release_memory()
        return Failure("error", describe(error)), float("nan")
    worst = max(errors, key=lambda e: float("inf") if e != e else e)
    if not worst <= tolerance:
        return Failure("wrong", f"relative error {worst:.2e} above {tolerance:.1e}; not timed"), worst
    return None, worst


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True, cwd=RESULTS.parent)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def environment() -> dict[str, Any]:
    """Return what a measurement depends on: GPU, driver, software versions, git revision, date (UTC)."""
    cuda = torch.cuda.is_available()
    dirty = _command("git", "status", "--porcelain", "--untracked-files=no")
    revision = os.environ.get("GIT_REVISION") or _command("git", "rev-parse", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size if cuda else None,
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "megatron_core": _version("megatron-core"),
        "transformer_engine": _version("transformer_engine"),
        "mla_attention": _version("mla-attention"),
        "git_revision": revision,
        "git_dirty": None if revision is None else bool(dirty),
    }


@dataclass(slots=True)
class Record:
    """One run's rows, ceilings and environment, and the JSON file they go to."""

    script: str
    tag: str = ""
    environment: dict[str, Any] = field(default_factory=environment)
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def measure_ceilings(self, watch: Stopwatch) -> None:
        """Measure the copy and matmul ceilings of this device in this run."""
        self.ceilings["copy_bytes_per_s"] = watch.copy_rate()
        release_memory()
        self.ceilings["matmul_flop_per_s"] = watch.matmul_rate()
        release_memory()

    def add(self, row: str, variant: str, result: Timing | Failure, **values: Any) -> dict[str, Any]:
        """Append one row; the status follows from ``result``."""
        entry: dict[str, Any] = {"row": row, "variant": variant}
        if isinstance(result, Failure):
            entry |= {"status": result.status, "message": result.message}
        else:
            entry |= {"status": "ok", **{k: round(v, 3) for k, v in asdict(result).items()}}
        entry |= values
        self.rows.append(entry)
        return entry

    def find(self, row: str, variant: str) -> dict[str, Any] | None:
        """Return the row of that name and variant, or None."""
        return next((r for r in self.rows if r["row"] == row and r["variant"] == variant), None)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-able data (non-finite numbers become null)."""
        data = {
            "schema": SCHEMA,
            "script": self.script,
            "environment": self.environment,
            "ceilings": self.ceilings,
            "rows": self.rows,
        }
        return _finite(data)

    def write(self, folder: Path) -> Path:
        """Write ``<script>_<device>_<date>[_<tag>].json`` into ``folder`` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        device, date = device_slug(self.environment["device"]), self.environment["date"][:10]
        path = folder / ("_".join(filter(None, [self.script, device, date, self.tag])) + ".json")
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        return path

    def summary(self, path: Path) -> str:
        """Return the last line of a run: device, ceilings, where the JSON lies."""
        copy, matmul = (self.ceilings.get(k, 0.0) / 1e12 for k in ("copy_bytes_per_s", "matmul_flop_per_s"))
        return f"{self.environment['device']}: copy {copy:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s; {path}"

    def exit_status(self, own: str = "ours") -> int:
        """Return 1 when a variant whose name starts with ``own`` is wrong or failed, 3 when only a peer did, else 0."""
        bad = [r["variant"] for r in self.rows if r["status"] in ("wrong", "error")]
        if any(variant.startswith(own) for variant in bad):
            return 1
        return 3 if bad else 0


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --out and --tag, which every script has."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tag", default="", help="end of the file name, where one day has several runs of one script")


def load(path: Path) -> dict[str, Any]:
    """Read a record written by :meth:`Record.write`.

    Raises:
        ValueError: the file is not such a record.
    """
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema is {data.get('schema') if isinstance(data, dict) else None}, known: {SCHEMA}")
    missing = {"script", "environment", "ceilings", "rows"} - data.keys()
    if missing:
        raise ValueError(f"{path}: fields missing: {sorted(missing)}")
    return data


def device_slug(name: str) -> str:
    """Return a device name as one word for a file name: 'NVIDIA H200' -> 'h200'."""
    word = re.sub(r"(?i)nvidia|amd|geforce|instinct", "", name)
    return re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") or "device"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def render_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a plain-text table with aligned columns; floats get three significant digits, None a dash."""
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(len(h), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(headings)]
    lines = ["  ".join(h.ljust(w) for h, w in zip(headings, widths, strict=True)).rstrip()]
    lines.append("  ".join("-" * w for w in widths))
    lines += ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in cells]
    return "\n".join(lines)


def target_text(row: Mapping[str, Any]) -> str | None:
    """Return 'met', 'missed: ...' or None for a row without targets."""
    if row.get("meets_target") is None:
        return None
    missed = [name for name, met in row.get("checks", {}).items() if not met]
    return "met" if row["meets_target"] else "missed: " + (", ".join(missed) or "target")


def cell(value: object) -> str:
    """Return one table cell as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if value != value:
            return "nan"
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
