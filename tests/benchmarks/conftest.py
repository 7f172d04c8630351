"""The benchmark scripts import one another by plain names, as scripts of one folder do."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script of the benchmarks folder by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(BENCHMARKS))]:
        del sys.modules[name]


@pytest.fixture
def device() -> str:
    """Where the kernels run: a GPU, else the interpreter on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def watch(script: Callable[[str], ModuleType]) -> Any:
    """A stopwatch that calls every variant once and says 100 microseconds."""
    measure = script("measure")

    class Watch:
        def measure(self, variants: dict[str, Callable[[], object]], **options: object) -> dict[str, object]:
            results: dict[str, object] = {}
            for name, call in variants.items():
                try:
                    call()
                    results[name] = measure.Timing(100.0, 90.0, 110.0, 20.0, 5)
                except Exception as error:  # what the real one does
                    results[name] = measure.Failure("error", measure.describe(error))
            return results

    return Watch()


@pytest.fixture
def record(script: Callable[[str], ModuleType]) -> Callable[[str], Any]:
    """A record with round ceilings: 4 TB/s and 800 TFLOP/s."""
    measure = script("measure")

    def make(name: str) -> Any:
        return measure.Record(name, ceilings={"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 800e12})

    return make
