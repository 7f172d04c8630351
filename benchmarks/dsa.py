"""DSA: every kernel with its FLOP rate, then a whole training step, dsa against dense MLA from 4k to 128k tokens.

Kernel rows: rate against the matmul or copy ceiling of the same run; peers: the twin, an einsum, torch.topk.
Layer rows: forward + backward with the sparse indexer loss on, one sequence, milliseconds and peak extra memory, dense
MLA of the same model beside it, and the length from which dsa is the faster (plot.py draws both curves).

    python benchmarks/dsa.py [--only kernels layer] [--groups scores topk indexer_topk sparse kl]
                             [--models glm5 deepseek_v32] [--lengths 4096 ... 131072] [--profile] [--out DIR]
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import breakdown
import costs
import dsa_kernels
import peers
import torch
from layer import GIB, Variant, step_memory
from measure import (
    Failure,
    Record,
    Stopwatch,
    Timing,
    add_output_arguments,
    describe,
    gate,
    release_memory,
    render_table,
    require_cuda,
    target_text,
)
from plot import dsa_points
from torch import Tensor

DEVICE = "cuda"
MODELS = ("glm5", "deepseek_v32")
LENGTHS = (4096, 16384, 32768, 65536, 131072)
V32_LENGTHS = (32768,)
EAGER_LIMIT = 4096  # tokens up to which the quadratic-memory peers run
FASTER_FROM = 65536
KL_TARGET = 1.3  # KL backward over the forward scores
GATE_TOKENS, GATE_TOPK = 512, 128
TOLERANCE = 2e-2


def measure_kernels(record: Record, watch: Stopwatch, groups: Sequence[str]) -> None:
    """Gate and time every kernel row of the groups."""
    for group in groups:
        cases = dsa_kernels.GROUPS[group]()
        while True:
            try:
                case = next(cases, None)
            except Exception as error:  # building the inputs failed; the other groups still run
                record.add(f"{group}/inputs", "ours", Failure("error", describe(error)))
                break
            if case is None:
                break
            measure_kernel(record, watch, case)
            del case
            release_memory()


def measure_kernel(record: Record, watch: Stopwatch, case: dsa_kernels.KernelCase) -> None:
    """Gate and time one kernel row and append a row for every variant."""
    results: dict[str, Timing | Failure] = {}
    errors: dict[str, float] = {}
    calls = dict(case.calls)
    for name, check in case.checks.items():
        failure, errors[name] = gate(check, case.tolerance)
        if failure is not None:
            results[name] = failure
            for variant in [v for v in calls if v.startswith(name)]:
                results[variant] = failure
                del calls[variant]
    results |= watch.measure(calls, seconds=1.0, least=3, most=30)
    for name, result in results.items():
        values: dict[str, Any] = {"relative_error": errors.get(name), "flop": case.flops, "bytes": case.bytes}
        if isinstance(result, Timing):
            seconds = result.us * 1e-6
            values["flop_per_s"] = case.flops / seconds
            values["matmul_share"] = values["flop_per_s"] / record.ceilings["matmul_flop_per_s"]
            values["bytes_per_s"] = case.bytes / seconds
            values["copy_share"] = values["bytes_per_s"] / record.ceilings["copy_bytes_per_s"]
            if name == "ours" and case.targets:
                checks = {key: values[key] >= aim for key, aim in case.targets.items()}
                values |= {"targets": case.targets, "checks": checks, "meets_target": all(checks.values())}
        record.add(case.name, name, result, **values)


def compare_kl_with_scores(record: Record) -> None:
    """Add to the KL step row how long its backward takes over the forward scores of as many tokens."""
    for row in record.rows:
        if row["row"].startswith("indexer_kl/") and row["row"].endswith("/step") and row["status"] == "ok":
            forward = record.find(row["row"].removesuffix("step") + "forward", row["variant"])
            heads, tokens = row["row"].split("/")[1].split("+")[0], row["row"].split("/")[2]
            scores = record.find(f"indexer_scores/{heads}/{tokens}x{tokens}", "ours")
            if forward and forward["status"] == "ok" and scores and scores["status"] == "ok":
                row["backward_over_scores"] = (row["us"] - forward["us"]) / scores["us"]
                if row["variant"] == "ours":
                    met = row["backward_over_scores"] <= KL_TARGET
                    row |= {"checks": {"backward": met}, "meets_target": met}


class Model:
    """The dsa and dense layers of one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.built: dict[str, Variant | Failure] = {}
        self.dsa_config = self.config("ours_dsa")
        self.dense_config = self.config("ours_dense")

    def config(self, variant: str, **more: Any) -> Any:
        """Our configuration behind a variant."""
        from mla_attention.configs import get_preset

        if variant == "ours_dense":
            return get_preset(self.name, experimental_attention_variant=None, apply_rope_fusion=True)
        settings = {
            "apply_rope_fusion": variant != "eager_dsa",
            "dsa_indexer_loss_coeff": 1e-3,
            "dsa_indexer_use_sparse_loss": True,
            **more,
        }
        return get_preset(self.name, **settings)

    def variant(self, name: str) -> Variant | Failure:
        """Return a built variant or why there is none; each is built once."""
        if name not in self.built:
            try:
                self.built[name] = self._build(name)
            except Exception as error:  # an absent peer costs its own rows only
                status = "skipped" if isinstance(error, ImportError) else "error"
                self.built[name] = Failure(status, describe(error))
                release_memory()
        return self.built[name]

    def _build(self, name: str) -> Variant:
        from mla_attention import MLASelfAttention
        from mla_attention.checkpoint import to_megatron_state_dict

        if name == "megatron_dsa":
            base = MLASelfAttention(self.dsa_config, device=DEVICE, dtype=torch.bfloat16)
            module = peers.megatron_dsa_layer(self.dsa_config, to_megatron_state_dict(base))
            return Variant(module, lambda hidden: module(hidden, attention_mask=None)[0])
        module = MLASelfAttention(self.config(name), device=DEVICE, dtype=torch.bfloat16)
        if name == "eager_dsa":
            module.core_attention.kernels = "torch"
        return Variant(module, lambda hidden: module(hidden)[0])

    def gate(self) -> Failure | None:
        """Check the dsa layer on few tokens, K below T, against the unfused fp32 layer on the keys that it selects."""
        from mla_attention import MLASelfAttention

        few = {"dsa_indexer_topk": GATE_TOPK}
        ours = MLASelfAttention(self.config("ours_dsa", **few), device=DEVICE, dtype=torch.bfloat16)
        twin = MLASelfAttention(self.config("eager_dsa", **few), device=DEVICE, dtype=torch.float32)
        twin.core_attention.kernels = "torch"
        twin.load_state_dict(ours.state_dict())
        hidden, grad = inputs(GATE_TOKENS, self.dsa_config.hidden_size)

        def check() -> list[tuple[Tensor, Tensor]]:
            *_, aux = ours(hidden, return_aux=True)
            runs = []
            for module, dtype in ((ours, torch.bfloat16), (twin, torch.float32)):
                leaf = hidden.detach().to(dtype).requires_grad_()
                output = module(leaf, topk_indices=aux.topk_indices)[0]
                runs.append((output.detach(), *torch.autograd.grad(output, leaf, grad.to(dtype))))
            return list(zip(*runs, strict=True))

        return gate(check, TOLERANCE)[0]


def inputs(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Random hidden states (a leaf) and output gradient of one sequence in bf16."""
    hidden, grad = (torch.randn(tokens, 1, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return hidden.requires_grad_(), grad


def measure_layers(
    record: Record, watch: Stopwatch, name: str, lengths: Sequence[int], out: Path, *, profile: bool
) -> list[str]:
    """Time and weigh a training step of every variant at every length; return breakdown lines."""
    model = Model(name)
    gates: dict[str, Failure | None] = {"ours_dsa": model.gate()}
    lines: list[str] = []
    for tokens in lengths:
        row = f"layer/{name}/{tokens}/step"
        names = ["ours_dsa", "ours_dense"] + (["eager_dsa", "megatron_dsa"] if tokens <= EAGER_LIMIT else [])
        try:
            hidden, grad = inputs(tokens, model.dsa_config.hidden_size)
            results: dict[str, Timing | Failure] = {}
            usable: dict[str, Variant] = {}
            for variant in names:
                built = gates.get(variant) or model.variant(variant)
                if isinstance(built, Failure):
                    results[variant] = built
                else:
                    usable[variant] = built
            steps = {n: partial(v.step, hidden, grad) for n, v in usable.items()}
            results |= watch.measure(steps, seconds=3.0, warmup=1, least=2, most=15)
            memory = {n: step_memory(v, hidden, grad) for n, v in usable.items() if isinstance(results[n], Timing)}
            add_layer_rows(record, model, row, tokens, results, memory)
            if profile and "ours_dsa" in memory:
                parts = breakdown.profile(steps["ours_dsa"], steps=1)
                us = parts["total_us"]
                record.add(f"{row}/profile", "ours_dsa", Timing(us, us, us, us, 1), **parts)
                lines += breakdown.lines(f"{row} ours_dsa", parts)
        except Exception as error:  # the other lengths still run
            record.add(row, "ours_dsa", Failure("error", describe(error)))
        hidden = grad = None
        release_memory()
        record.write(out)
    return lines


def add_layer_rows(
    record: Record,
    model: Model,
    row: str,
    tokens: int,
    results: dict[str, Timing | Failure],
    memory: dict[str, int | None],
) -> None:
    """Append the rows of one length with roofline, memory and the ratio to dense MLA."""
    dense = results.get("ours_dense")
    for name, result in results.items():
        config = model.dense_config if name == "ours_dense" else model.dsa_config
        sparse = name != "ours_dense"
        flop = costs.dsa_layer_flops(config, tokens) if sparse else costs.dense_layer_flops(config, [tokens])
        values: dict[str, Any] = {"tokens": tokens, "flop": flop, "peak_extra_bytes": memory.get(name)}
        if isinstance(result, Timing):
            values["roofline_us"] = flop / record.ceilings["matmul_flop_per_s"] * 1e6
            values["flop_per_s"] = flop / (result.us * 1e-6)
            if sparse and isinstance(dense, Timing):
                values["time_over_dense"] = result.us / dense.us
                if name == "ours_dsa" and model.name == "glm5" and tokens >= FASTER_FROM:
                    met = values["time_over_dense"] < 1.0
                    values |= {"checks": {"faster than dense": met}, "meets_target": met}
        record.add(row, name, result, **values)


def crossover(points: Sequence[tuple[int, float, float]]) -> float | None:
    """Return the tokens from which the first time is below the second, interpolated in log-log; None when it never is.

    Args:
        points: (tokens, dsa us, dense us), ascending tokens.
    """
    gaps = [(math.log(t), math.log(a) - math.log(b)) for t, a, b in points]
    if gaps and gaps[0][1] <= 0:
        return float(points[0][0])
    for (x0, y0), (x1, y1) in itertools.pairwise(gaps):
        if y0 > 0 >= y1:
            return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
    return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render the kernel and layer rows."""
    body: list[list[object]] = []
    for r in rows:
        if r["row"].endswith("/profile") or r["status"] == "skipped":
            continue
        if r["status"] != "ok":
            body.append([r["row"], r["variant"], r["status"], None, None, None, None, r["message"][:60]])
            continue
        teraflops = r["flop_per_s"] / 1e12 if r.get("flop") else None
        terabytes = r["bytes_per_s"] / 1e12 if r.get("bytes") else None
        extra = r["peak_extra_bytes"] / GIB if r.get("peak_extra_bytes") else None
        ratio = r.get("time_over_dense", r.get("backward_over_scores"))
        body.append([r["row"], r["variant"], r["us"], teraflops, terabytes, extra, ratio, target_text(r)])
    return render_table(["row", "variant", "us", "TFLOP/s", "TB/s", "extra GiB", "ratio", "target"], body)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=("kernels", "layer"), default=["kernels", "layer"])
    parser.add_argument("--groups", nargs="+", choices=dsa_kernels.GROUPS, default=list(dsa_kernels.GROUPS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of the layer rows")
    parser.add_argument("--profile", action="store_true", help="add a per-kernel breakdown of the dsa step")
    add_output_arguments(parser)
    arguments = parser.parse_args(argv)
    require_cuda()
    record, watch = Record("dsa", arguments.tag), Stopwatch()
    record.measure_ceilings(watch)
    lines: list[str] = []
    if "kernels" in arguments.only:
        measure_kernels(record, watch, arguments.groups)
        compare_kl_with_scores(record)
        record.write(arguments.out)
    if "layer" in arguments.only:
        for name in arguments.models:
            lengths = arguments.lengths or (LENGTHS if name == "glm5" else V32_LENGTHS)
            try:
                lines += measure_layers(record, watch, name, lengths, arguments.out, profile=arguments.profile)
            except Exception as error:  # the other model still runs
                record.add(f"layer/{name}", "ours_dsa", Failure("error", describe(error)))
            release_memory()
            points = dsa_points({"dsa": record.to_json()}, name)
            if len(points) > 1:
                at = crossover(points)
                lines.append(
                    f"{name}: dsa is faster than dense " + (f"from {at:.0f} tokens" if at else "nowhere measured")
                )
    path = record.write(arguments.out)
    print("\n".join([*lines, table(record.rows)]))
    print(record.summary(path))
    return record.exit_status()


if __name__ == "__main__":
    raise SystemExit(main())
