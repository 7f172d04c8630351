"""Turn the newest benchmark JSON of each script into the README's table and one picture.

    python benchmarks/plot.py [--results DIR] [--readme README.md] [--picture FILE]

The table goes between ``<!-- benchmarks:begin -->`` and ``<!-- benchmarks:end -->``; without --readme it is printed.
Rows whose JSON is missing, or whose measurement failed, are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure import RESULTS, cell, load

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
SCRIPTS = ("rope", "assembly", "layer", "dsa")
ROOT = Path(__file__).resolve().parent.parent
OURS, THEIRS, GRID = "#2f6fde", "#aab2bf", "#d8dce3"
GIB = 2.0**30
Records = Mapping[str, Mapping[str, Any]]


class Line(NamedTuple):
    """One row of the README's table; ``relative`` are our times over the peer's, for the picture."""

    label: str
    ours: str
    peer: str
    ratio: str
    relative: tuple[tuple[str, float], ...] = ()


def newest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return script name -> record with the newest measurement of each row; files of other kinds are skipped."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in folder.glob("*.json"):
        try:
            record = load(path)
        except ValueError:
            continue
        found.setdefault(record["script"], []).append(record)
    merged = {}
    for script, records in found.items():
        records.sort(key=lambda r: r["environment"]["date"])
        rows: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            rows |= by_row(record["rows"])
        merged[script] = {**records[-1], "rows": [r for group in rows.values() for r in group]}
    return merged


def by_row(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group rows by name; names of which nothing was measured are left out."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["row"], []).append(row)
    return {name: group for name, group in groups.items() if any(r["status"] == "ok" for r in group)}


def row_of(records: Records, script: str, row: str, variant: str) -> Mapping[str, Any] | None:
    """Return a measured row, or None when it is absent or failed."""
    for r in records.get(script, {}).get("rows", ()):
        if r["row"] == row and r["variant"] == variant and r["status"] == "ok":
            return r
    return None


def pair_line(
    records: Records, script: str, base: str, label: str, variant: str, peers: Sequence[str], passes: Sequence[str]
) -> Line | None:
    """Return a line of two passes (forward, backward) in microseconds, or None when one is missing."""
    ours = [row_of(records, script, f"{base}/{p}", variant) for p in passes]
    theirs = [next(filter(None, (row_of(records, script, f"{base}/{p}", v) for v in peers)), None) for p in passes]
    if not all(ours) or not all(theirs):
        return None
    left, right = ([r["us"] for r in rows if r] for rows in (ours, theirs))
    speed = " / ".join(f"{b / a:.2f}x" for a, b in zip(left, right, strict=True))
    relative = tuple((f"{label}, {p}", a / b) for p, a, b in zip(passes, left, right, strict=True))
    join = lambda values: " / ".join(cell(v) for v in values) + " us"  # noqa: E731
    return Line(f"{label}, {' / '.join(passes)}", join(left), join(right), speed, relative)


def layer_line(records: Records, model: str, title: str, tokens: int) -> Line | None:
    """Return the line of a whole layer's training step: milliseconds and extra memory."""
    row = f"{model}/sbhd/{tokens}/step"
    ours = row_of(records, "layer", row, "ours_auto")
    theirs = [row_of(records, "layer", row, v) for v in ("megatron_fused", "megatron_unfused")]
    ran = [r for r in theirs if r]
    if ours is None or not ran:
        return None
    peer = min(ran, key=lambda r: r["us"])
    label = f"{title} layer, {tokens} tokens, forward + backward, extra memory"
    relative = ((f"{title} layer, {tokens}", ours["us"] / peer["us"]),)
    return Line(label, milliseconds(ours), milliseconds(peer), f"{peer['us'] / ours['us']:.2f}x", relative)


def milliseconds(row: Mapping[str, Any]) -> str:
    """Return a step's time, and its extra memory where it was measured."""
    extra = row.get("peak_extra_bytes")
    return f"{row['us'] / 1e3:.1f} ms" + (f", {extra / GIB:.2f} GiB" if extra else "")


def dsa_line(records: Records) -> Line | None:
    """Return the line of the longest GLM-5 training step that ran both sparse and dense."""
    points = dsa_points(records, "glm5")
    if not points:
        return None
    tokens, ours, dense = points[-1]
    row = f"layer/glm5/{tokens}/step"
    left, right = (row_of(records, "dsa", row, v) for v in ("ours_dsa", "ours_dense"))
    label = f"GLM-5 layer with DSA, {tokens // 1024}k tokens, training step (peer: our dense layer)"
    return Line(label, milliseconds(left or {}), milliseconds(right or {}), f"{dense / ours:.2f}x")


def dsa_points(records: Records, model: str) -> list[tuple[int, float, float]]:
    """Return (tokens, dsa us, dense us) where both ran."""
    times: dict[int, dict[str, float]] = {}
    for r in records.get("dsa", {}).get("rows", ()):
        parts = r["row"].split("/")
        if parts[:2] == ["layer", model] and parts[-1] == "step" and r["status"] == "ok":
            times.setdefault(int(parts[2]), {})[r["variant"]] = r["us"]
    both = {t: v for t, v in times.items() if {"ours_dsa", "ours_dense"} <= v.keys()}
    return [(t, both[t]["ours_dsa"], both[t]["ours_dense"]) for t in sorted(both)]


def readme_lines(records: Records) -> list[Line]:
    """Return the rows of the README's table that the records can fill."""
    passes = ("forward", "backward")
    lines = [
        pair_line(records, "rope", "glm5_q", "RoPE, GLM-5 query, 16k tokens", "ours", ["megatron"], passes),
        pair_line(records, "rope", "indexer_k", "RoPE, DSA indexer key, 64k tokens", "ours", ["megatron"], passes),
        pair_line(
            records,
            "assembly",
            "assembly/dsv3",
            "key and value from the latent, DeepSeek-V3, 16k tokens",
            "ours_gemm",
            ["megatron", "ours_split"],
            passes,
        ),
        layer_line(records, "deepseek_v3", "DeepSeek-V3", 4096),
        layer_line(records, "glm5", "GLM-5", 16384),
        dsa_line(records),
    ]
    return [line for line in lines if line]


def markdown(records: Records, picture: str | None) -> str:
    """Return the README's table and picture."""
    environment = next(iter(records.values()))["environment"]
    versions = f"torch {environment['torch']}, Triton {environment['triton']}"
    dates = sorted({r["environment"]["date"][:10] for r in records.values()})
    peer = " ".join(filter(None, ["megatron-core", environment.get("megatron_core")]))
    lines = [
        f"Measured on one {environment['device']}, bf16, cold L2, medians, {versions}, {' and '.join(dates)}:",
        "",
        f"| | here | {peer} | faster |",
        "|---|---|---|---|",
    ]
    lines += [f"| {line.label} | {line.ours} | {line.peer} | {line.ratio} |" for line in readme_lines(records)]
    if picture:
        lines += ["", f"![our times beside the peers']({picture})"]
    return "\n".join(lines)


def replace_between(text: str, content: str) -> str:
    """Put ``content`` between the markers.

    Raises:
        ValueError: a marker is missing, or they stand in the wrong order.
    """
    start, end = text.find(BEGIN), text.find(END)
    if start < 0 or end < start:
        raise ValueError(f"readme: markers {BEGIN} and {END} must stand in it once, in this order")
    return f"{text[: start + len(BEGIN)]}\n{content}\n{text[end:]}"


def draw(records: Records, path: Path) -> None:
    """Draw our times over the peer's as bars and, when measured, the dsa and dense curves beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [pair for line in readme_lines(records) for pair in line.relative]
    curves = dsa_points(records, "glm5")
    panels = [name for name, present in (("bars", bars), ("curves", curves)) if present]
    if not panels:
        raise ValueError(f"results: no measured row of {', '.join(SCRIPTS)} to draw")
    height = max(2.6, 0.38 * len(bars) + 1.2)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.6 * len(panels), height), layout="constrained", squeeze=False
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        if panel == "bars":
            draw_bars(axis, bars)
        else:
            draw_curves(axis, curves)
        axis.spines[["top", "right"]].set_visible(False)
    environment = next(iter(records.values()))["environment"]
    figure.suptitle(f"{environment['device']}, bf16", fontsize=9, color="#555555")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_bars(axis: Any, bars: Sequence[tuple[str, float]]) -> None:
    """Horizontal bars of our time over the peer's, 1 marked."""
    rows = range(len(bars))
    axis.barh(rows, [value for _, value in bars], 0.62, color=OURS)
    for row, (_, value) in zip(rows, bars, strict=True):
        axis.text(value + 0.015, row, f"{value:.2f}", va="center", fontsize=8)
    axis.axvline(1.0, color=THEIRS, linewidth=1.5)
    axis.set_yticks(list(rows), [label for label, _ in bars], fontsize=8)
    axis.set_xlim(0, max(1.15, *(value * 1.12 for _, value in bars)))
    axis.invert_yaxis()
    axis.set_title("time over megatron-core's (line: 1.0)", fontsize=9)


def draw_curves(axis: Any, points: Sequence[tuple[int, float, float]]) -> None:
    """Milliseconds of a GLM-5 training step over the sequence length, sparse and dense."""
    tokens = [t for t, _, _ in points]
    axis.plot(tokens, [d / 1e3 for _, _, d in points], "o-", color=THEIRS, label="dense MLA", markersize=4)
    axis.plot(tokens, [s / 1e3 for _, s, _ in points], "o-", color=OURS, label="DSA", markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [f"{t // 1024}k" for t in tokens])
    axis.minorticks_off()
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_xlabel("tokens", fontsize=8)
    axis.set_title("GLM-5 layer, training step, ms", fontsize=9)
    axis.legend(frameon=False, fontsize=8)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, help="file to write the table into, between its markers")
    parser.add_argument("--picture", type=Path, help="PNG to draw; default: overview.png in the results folder")
    arguments = parser.parse_args(argv)
    records = newest(arguments.results)
    if not records:
        print(f"no benchmark JSON in {arguments.results}")
        return 1
    picture = arguments.picture or arguments.results / "overview.png"
    draw(records, picture)
    resolved = picture.resolve()
    shown = resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else picture.as_posix()
    content = markdown(records, shown)
    if arguments.readme is None:
        print(content)
    else:
        arguments.readme.write_text(replace_between(arguments.readme.read_text(), content))
    print(f"wrote {picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
