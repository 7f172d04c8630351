"""Runs many cases in one set of gloo ranks: starting processes costs more than the cases themselves.

A case is a function registered with `@case(world)` that all ranks run together and that raises where something is
wrong. `outcomes(world)` starts the ranks once and says for each case what each rank raised.
"""

import importlib
import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

CASES: dict[int, dict[str, Callable[[], None]]] = {2: {}, 4: {}}
TIMEOUT = timedelta(seconds=90)


def case(world: int, name: str | None = None) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function that `world` ranks run together."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        key = name or function.__name__
        if key in CASES[world]:
            raise ValueError(f"name: given {key!r} twice, allowed is once")
        CASES[world][key] = function
        return function

    return register


def load_cases() -> None:
    """Import every module that registers cases."""
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        importlib.import_module(f"tests.mla_attention.parallel.{path.stem}")


def run_rank(rank: int, world: int, folder: str) -> None:
    """What each rank does: every case in order, until one fails; the outcomes go into a file."""
    load_cases()
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    found: dict[str, str] = {}
    for name, function in CASES[world].items():
        try:
            function()
            dist.barrier()
            found[name] = ""
        except Exception:  # reported for this rank; the others see the connection close and stop too
            found[name] = traceback.format_exc()
            break
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def outcomes(world: int, folder: Path) -> dict[str, str]:
    """Run all cases of `world` ranks; for each, what the ranks raised, "" where none did."""
    torch.multiprocessing.spawn(run_rank, (world, str(folder)), nprocs=world)
    ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return {
        name: "\n".join(
            f"rank {rank}: {text}"
            for rank, found in enumerate(ranks)
            if (text := found.get(name, "not run: an earlier case failed"))
        )
        for name in CASES[world]
    }
