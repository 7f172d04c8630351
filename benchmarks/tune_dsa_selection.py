"""Which tiles, warps and stages the DSA selection kernels should take: times a list of choices, after a check of each.

    python benchmarks/tune_dsa_selection.py [--only scores topk] [--seconds 0.15]

Prints one table for each shape, fastest first; the choice of the rule is marked. Scores: rate against the matmul
ceiling. Top-k: one read of the scores against the copy ceiling, and the share of rows that the sampled kernel left.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from measure import Failure, Stopwatch, describe, require_cuda
from torch import Tensor

from mla_attention.fusions import reference
from mla_attention.fusions.dsa import topk_select as topk_module
from mla_attention.fusions.dsa.indexer_scores import ScoreBlocks, choose_score_blocks, launch_scores
from mla_attention.fusions.dsa.topk_select import TopkBlocks, choose_topk_blocks, launch_topk

SCORE_SHAPES = ((32, 2048, 32768), (64, 2048, 32768))  # heads, rows, keys
TOPK_SHAPES = ((2048, 32768, 2048), (2048, 131072, 2048))  # rows, keys, topk
WIDTH = 128
COMPILERS = 8


def score_choices(rule: ScoreBlocks) -> list[ScoreBlocks]:
    """The rule's choice, then others that fit a Hopper SM."""
    tiles = ((64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3))
    others = [ScoreBlocks(*tile, rule.group) for tile in (*tiles, (64, 256, 8, 2), (128, 256, 8, 2))]
    groups = [replace(rule, group=group) for group in (rule.group // 2, rule.group * 2)]
    return list(dict.fromkeys([rule, *others, *groups]))


def topk_choices(rule: TopkBlocks) -> list[TopkBlocks]:
    """The rule's choice, then one change at a time and a few together."""
    changes: list[dict[str, int | None]] = [
        {"sample": 0},
        {"sample": 1024},
        {"sample": 4096},
        {"group": 1},
        {"group": 8},
        {"mark_block": 2048},
        {"mark_block": 8192},
        {"max_registers": 96, "programs_per_sm": 5},
        {"max_registers": None, "programs_per_sm": 2},
        {"programs_per_sm": 3},
        {"programs_per_sm": 8},
        {"num_warps": 8, "mark_block": 8192, "max_registers": 80, "programs_per_sm": 3},
        {"num_warps": 8, "mark_block": 8192, "max_registers": 128, "programs_per_sm": 2},
        {"num_warps": 8, "mark_block": 4096, "max_registers": 64, "programs_per_sm": 4},
    ]
    return list(dict.fromkeys([rule, *(replace(rule, **change) for change in changes)]))  # type: ignore[arg-type]


def compile_all(calls: Mapping[str, Callable[[], object]]) -> None:
    """Call each once, several at a time: compiling is most of it. What raises here raises again when it is timed."""

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            print(f"  {describe(error)}")

    first, *rest = calls.values()
    attempt(first)
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(attempt, rest))
    torch.cuda.synchronize()


def show(title: str, lines: Sequence[tuple[float, str]]) -> None:
    """Print (microseconds, text) lines, fastest first."""
    print(f"\n{title}")
    for us, text in sorted(lines):
        print(f"  {us:9.1f} us  {text}")


def tune_scores(watch: Stopwatch, seconds: float, ceiling: float) -> None:
    """Time the tile choices of indexer_scores on rows that see every key."""
    for heads, rows, keys in SCORE_SHAPES:
        q = torch.randn(rows, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(keys, WIDTH, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(rows, heads, device="cuda")
        out = torch.empty(rows, keys, device="cuda")
        rule = choose_score_blocks(torch.bfloat16, heads, WIDTH)
        launch = partial(launch_scores, q, k, weights, out, relu=True, first_row=keys, fill=False)
        calls = {str(choice): partial(launch, blocks=choice) for choice in score_choices(rule)}
        compile_all(calls)
        logits = torch.einsum("thd,sd->ths", q[-8:].float(), k.float()).relu()
        expected = torch.einsum("ths,th->ts", logits, weights[-8:])
        lines, right = [], {}
        for name, call in calls.items():
            out.fill_(float("nan"))
            try:
                call()
            except Exception as error:
                lines.append((float("inf"), f"{name}: {describe(error)}"))
                continue
            if torch.allclose(out[-8:], expected, rtol=1e-3, atol=1e-2 * heads**0.5) and not out.isnan().any():
                right[name] = call
            else:
                lines.append((float("inf"), f"{name}: WRONG"))
        for name, timing in watch.measure(right, seconds=seconds * len(right), warmup=1).items():
            if isinstance(timing, Failure):
                lines.append((float("inf"), f"{name}: {timing.message}"))
                continue
            rate = 2 * heads * rows * keys * WIDTH / (timing.us * 1e-6)
            mark = "  <- rule" if name == str(rule) else ""
            lines.append((timing.us, f"{rate / 1e12:5.0f} TFLOP/s = {rate / ceiling:.2f} of matmul  {name}{mark}"))
        show(f"indexer_scores, {heads} heads, {rows} x {keys}", lines)


class _RowsLeft:
    """Stands before the buffered kernel and sees how many rows it is handed."""

    def __init__(self) -> None:
        self.kernel = topk_module._topk_buffered_kernel
        self.share = 1.0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launch(*arguments: object, **options: object) -> object:
            todo = arguments[4]
            self.share = float(todo.float().mean()) if isinstance(todo, Tensor) else 1.0
            return self.kernel[grid](*arguments, **options)

        return launch


def tune_topk(watch: Stopwatch, seconds: float, ceiling: float) -> None:
    """Time the choices of top-k on rows of normal scores, and torch.topk beside them."""
    for rows, keys, topk in TOPK_SHAPES:
        scores = torch.randn(rows, keys, device="cuda")
        out = torch.empty(rows, topk, dtype=torch.int64, device="cuda")
        rule = choose_topk_blocks(topk)
        if rule is None:
            raise RuntimeError(f"no buffered choice for topk {topk}")
        calls = {str(c): partial(launch_topk, scores, out, topk=topk, blocks=c) for c in topk_choices(rule)}
        compile_all(calls)
        some = slice(None, None, rows // 64)
        expected = reference.topk_select(scores[some], topk)
        lines: list[tuple[float, str]] = []
        right: dict[str, Callable[[], object]] = {"torch.topk": partial(torch.topk, scores, topk, sorted=False)}
        left: dict[str, float] = {}
        spy = _RowsLeft()
        for name, call in calls.items():
            out.fill_(-7)
            topk_module._topk_buffered_kernel = spy  # type: ignore[assignment]
            try:
                call()
            except Exception as error:
                lines.append((float("inf"), f"{name}: {describe(error)}"))
                continue
            finally:
                topk_module._topk_buffered_kernel = spy.kernel
            left[name] = spy.share
            if torch.equal(out[some], expected) and not (out == -7).any():
                right[name] = call
            else:
                lines.append((float("inf"), f"{name}: WRONG"))
        for name, timing in watch.measure(right, seconds=seconds * len(right), warmup=1).items():
            if isinstance(timing, Failure):
                lines.append((float("inf"), f"{name}: {timing.message}"))
                continue
            rate = 4 * rows * keys / (timing.us * 1e-6)
            mark = "  <- rule" if name == str(rule) else ""
            rest = f", {100 * left[name]:.1f} % of rows left" if name in left else ""
            text = f"{rate / 1e12:5.2f} TB/s read = {rate / ceiling:.2f} of copy{rest}  {name}{mark}"
            lines.append((timing.us, text))
        show(f"topk_select, {topk} of {keys}, {rows} rows", lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse arguments and tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("scores", "topk"), default=("scores", "topk"))
    parser.add_argument("--seconds", type=float, default=0.15, help="device time for each choice")
    options = parser.parse_args(arguments)
    require_cuda()
    watch = Stopwatch()
    matmul, copy = watch.matmul_rate(), watch.copy_rate()
    print(f"{torch.cuda.get_device_name()}: matmul {matmul / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s")
    if "scores" in options.only:
        tune_scores(watch, options.seconds, matmul)
    if "topk" in options.only:
        tune_topk(watch, options.seconds, copy)


if __name__ == "__main__":
    main()
