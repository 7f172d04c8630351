"""Where a step's device time goes: kernels grouped as GEMM, attention and the rest, with shares that sum to one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

GROUPS = ("attention", "gemm", "rest")  # matched in this order: attention kernels may carry 'gemm' in their names
_ATTENTION = re.compile(r"fmha|flash|sdpa|attention|attn|dot_do_o|softmax|sparse_mla|indexer|topk|_kl_", re.IGNORECASE)
_GEMM = re.compile(r"gemm|nvjet|cutlass|cublas|splitk|matmul|\bmm_|_mm_|xmma", re.IGNORECASE)


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    if _ATTENTION.search(kernel):
        return "attention"
    if _GEMM.search(kernel):
        return "gemm"
    return "rest"


def summarise(kernels: Iterable[tuple[str, float]], steps: int = 1, top: int = 40) -> dict[str, Any]:
    """Group (name, microseconds) kernel times.

    Args:
        kernels: every device activity: kernels, copies, fills.
        steps: how many steps they come from; all times are divided by it.
        top: how many kernels to list by name.

    Returns:
        ``total_us``, ``groups`` (name -> us), ``shares`` (name -> fraction of the total; they sum to one),
        ``kernels`` (the longest ones: name, group, us, calls a step).
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, us in kernels:
        by_name[name].append(us)
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, times in by_name.items():
        groups[group_of(name)] += sum(times) / steps
    total = sum(groups.values())
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    return {
        "total_us": total,
        "groups": groups,
        "shares": {name: (us / total if total else 0.0) for name, us in groups.items()},
        "kernels": [
            {"name": name[:160], "group": group_of(name), "us": sum(times) / steps, "calls": len(times) / steps}
            for name, times in longest
        ],
    }


def idle(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the time between the first start and the last end in which no (start, end) range runs."""
    idle_time, reached = 0.0, None
    for start, end in sorted(ranges):
        if reached is not None and start > reached:
            idle_time += start - reached
        reached = end if reached is None else max(reached, end)
    return idle_time


def profile(step: Callable[[], object], steps: int = 3) -> dict[str, Any]:
    """Run a warm step under torch.profiler and return its :func:`summarise`, and ``idle_us`` a step.

    Idle is the device time between kernels, here with the profiler's own cost on the host: an upper bound.
    """
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [
        event
        for event in recorded.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    parts = summarise([(event.name, float(event.device_time_total)) for event in events], steps)
    parts["idle_us"] = idle((event.time_range.start, event.time_range.end) for event in events) / steps
    return parts


def lines(name: str, breakdown: Mapping[str, Any]) -> list[str]:
    """Render one breakdown as text lines: the groups, then the longest kernels."""
    shares = "  ".join(f"{g} {us / 1e3:.2f} ms {breakdown['shares'][g]:.1%}" for g, us in breakdown["groups"].items())
    between = f", idle {breakdown['idle_us'] / 1e3:.2f} ms" if "idle_us" in breakdown else ""
    out = [f"{name}: {breakdown['total_us'] / 1e3:.2f} ms on the device = {shares}{between}"]
    for k in breakdown["kernels"]:
        out.append(f"    {k['us'] / 1e3:8.3f} ms {k['calls']:5.1f}x {k['group']:<9} {k['name'][:90]}")
    return out
