"""One call of a DSA kernel row, for a profiler to look at: no peers, no timing, no check.

    ncu --clock-control none --set full -k 'regex:topk|scores' python benchmarks/dsa_once.py topk scores

The row is run once before `cudaProfilerStart` to compile it; add `--profile-from-start off` so that only the second
run is looked at.
"""

from __future__ import annotations

import argparse

import dsa_kernels
import torch
from measure import release_memory, require_cuda


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("groups", nargs="+", choices=dsa_kernels.GROUPS)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    arguments = parser.parse_args(argv)
    require_cuda()
    for group in arguments.groups:
        for case in dsa_kernels.GROUPS[group]():
            if arguments.rows not in case.name:
                continue
            call = case.calls["ours"]
            call()  # compiles, and builds what a backward goes through
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print(case.name)
            del call
            release_memory()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
