"""One MLASelfAttention, forward and training step, against megatron-core, transformers and torch.compile.

Layouts: ``sbhd`` one sequence, ``packed`` eight sequences of an eighth each (thd), ``batch8`` the same eight as a batch
(what packing would cost if it were free), ``ragged`` eight sequences of eight lengths (thd). A step is forward +
backward with fresh parameter gradients.
Roofline: GEMM and attention FLOPs (costs.py) at the bf16 matmul rate of the same run. Memory: peak above what is
allocated before the step, parameter gradients already allocated, beside the lower bound of q, k, v, o and gradients.

    python benchmarks/layer.py [--models glm5 deepseek_v3] [--lengths 4096 16384] [--layouts sbhd packed ragged batch8]
                               [--variants NAME ...] [--profile] [--out DIR]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import breakdown
import costs
import peers
import torch
from measure import (
    Failure,
    Record,
    Stopwatch,
    Timing,
    add_output_arguments,
    describe,
    gate,
    peak_extra_bytes,
    release_memory,
    render_table,
    require_cuda,
    target_text,
)
from torch import Tensor, nn

DEVICE = "cuda"
MODELS = ("glm5", "deepseek_v3")
LAYOUTS = ("sbhd", "packed", "ragged", "batch8")
VARIANTS = (
    *("ours_auto", "ours_split", "ours_gemm", "ours_one_down_proj", "ours_compile"),
    *("megatron_fused", "megatron_unfused", "transformers_sdpa", "transformers_eager"),
)
SEQUENCES = 8
RAGGED = (9, 3, 13, 6, 10, 4, 12, 7)  # 64ths of the tokens, by sequence
GATE_TOKENS = 512
EAGER_TOKENS = 4096
TOLERANCE = 2e-2
TIME_TARGETS = {("glm5", 4096): 0.90, ("deepseek_v3", 4096): 0.90, ("glm5", 16384): 0.95, ("deepseek_v3", 16384): 0.985}
MEMORY_TARGET = 0.88
PACKED_TARGET = 1.15
REST_TARGET = 0.06
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a model, a layout and a number of tokens."""

    model: str
    layout: str
    tokens: int

    @property
    def name(self) -> str:
        """Row name without the pass."""
        return f"{self.model}/{self.layout}/{self.tokens}"

    @property
    def lengths(self) -> list[int]:
        """Lengths of the sequences in it."""
        if self.layout == "ragged":
            return [self.tokens // sum(RAGGED) * share for share in RAGGED]
        count = 1 if self.layout == "sbhd" else SEQUENCES
        return [self.tokens // count] * count

    @property
    def hidden_shape(self) -> tuple[int, int]:
        """Leading dimensions of the hidden states."""
        if self.layout == "batch8":
            return self.tokens // SEQUENCES, SEQUENCES
        return self.tokens, 1

    def offsets(self) -> list[int]:
        """cu_seqlens of the packed layouts."""
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def is_packed(self) -> bool:
        """Whether sequences lie along one token axis."""
        return self.layout in ("packed", "ragged")


@dataclass(slots=True)
class Variant:
    """A built layer: its module and a call hidden -> output."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]

    def step(self, hidden: Tensor, grad: Tensor, *, keep_grads: bool = False) -> None:
        """Forward and backward; parameter gradients start afresh unless they are to be kept."""
        if not keep_grads:
            self.module.zero_grad(set_to_none=True)
        hidden.grad = None
        self.call(hidden).backward(grad)

    def gradients(self, hidden: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Output and input gradient on a copy of ``hidden``."""
        leaf = hidden.detach().clone().requires_grad_()
        output = self.call(leaf)
        (input_grad,) = torch.autograd.grad(output, leaf, grad)
        return output.detach(), input_grad


class Model:
    """The variants of one model, all with the same random weights; failures to build are kept as failures."""

    def __init__(self, name: str) -> None:
        from mla_attention.configs import get_preset

        self.name = name
        self.config = get_preset(name, experimental_attention_variant=None)
        base = self._ours(kv_assembly="auto")
        with torch.no_grad():
            for key, parameter in base.named_parameters():
                if "layernorm" in key:
                    parameter.normal_(1.0, 0.1)
        self.base = base
        self.built: dict[str, Variant | Failure] = {}

    def _ours(self, **overrides: Any) -> nn.Module:
        from mla_attention import MLASelfAttention
        from mla_attention.configs import get_preset

        settings = {"apply_rope_fusion": True, **overrides}
        dtype = settings.pop("dtype", torch.bfloat16)
        config = get_preset(self.name, experimental_attention_variant=None, **settings)
        module = MLASelfAttention(config, device=DEVICE, dtype=dtype)
        if hasattr(self, "base"):
            module.load_state_dict(self.base.state_dict())
        return module

    def oracle(self, packed: Any) -> Variant:
        """The unfused layer with eager attention in fp32 on the same weights."""
        module = self._ours(apply_rope_fusion=False, core_attention_backend="reference", dtype=torch.float32)
        call = lambda hidden: module(hidden.float(), packed_seq_params=packed)[0]  # noqa: E731
        return Variant(module, call)

    def variant(self, name: str, case: Case) -> Variant | Failure:
        """Return a variant for a case, or why there is none; modules are built once."""
        if name.startswith("transformers") and case.is_packed:
            return Failure("skipped", "transformers' attention of this kind takes no packed sequences")
        if name == "transformers_eager" and case.tokens > EAGER_TOKENS:
            return Failure("skipped", f"its weights of all pairs are measured up to {EAGER_TOKENS} tokens")
        if case.layout == "batch8" and name != "ours_auto":
            return Failure("skipped", "measured for ours_auto only")
        key = "ours_auto" if name == "ours_compile" else name
        if key not in self.built:
            try:
                self.built[key] = self._build(key)
            except Exception as error:  # an absent peer costs its own rows only
                absent = isinstance(error, ImportError)
                self.built[key] = Failure("skipped" if absent else "error", describe(error))
                release_memory()
        built = self.built[key]
        if isinstance(built, Failure):
            return built
        return Variant(built.module, self._bound(name, built, case))

    def _build(self, name: str) -> Variant:
        from mla_attention.checkpoint import to_hf_state_dict, to_megatron_state_dict

        if name.startswith("ours"):
            if name == "ours_auto":
                return Variant(self.base, self.base)
            one = {"mla_down_proj_fusion": True} if name == "ours_one_down_proj" else {}
            module = self._ours(**(one or {"kv_assembly": name.removeprefix("ours_")}))
            return Variant(module, module)
        if name.startswith("megatron"):
            weights = to_megatron_state_dict(self.base, fused_norm=True)
            module = peers.megatron_layer(self.config, weights, fused=name == "megatron_fused")
            return Variant(module, module)
        kind = name.removeprefix("transformers_")
        module, call = peers.transformers_layer(self.config, to_hf_state_dict(self.base), 16384, torch.bfloat16, kind)
        return Variant(module, call)

    def _bound(self, name: str, built: Variant, case: Case) -> Callable[[Tensor], Tensor]:
        if name.startswith("transformers"):
            return built.call
        module = built.module
        if name == "ours_compile":
            module = torch.compile(module, dynamic=False)
        if name.startswith("megatron"):
            packed = None
            if case.is_packed:
                offsets = torch.tensor(case.offsets(), device=DEVICE, dtype=torch.int32)
                packed = peers.megatron_packed(offsets, max(case.lengths))
            return lambda hidden: module(hidden, attention_mask=None, packed_seq_params=packed)[0]
        packed = own_packed(case)
        return lambda hidden: module(hidden, packed_seq_params=packed)[0]


def own_packed(case: Case) -> Any:
    """Our PackedSeqParams of a packed case, None otherwise."""
    from mla_attention import PackedSeqParams

    if not case.is_packed:
        return None
    return PackedSeqParams(torch.tensor(case.offsets(), device=DEVICE, dtype=torch.int32))


def hidden_and_grad(case: Case, width: int) -> tuple[Tensor, Tensor]:
    """Random hidden states (a leaf) and output gradient in bf16."""
    shape = (*case.hidden_shape, width)
    hidden, grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return hidden.requires_grad_(), grad


def short_gate(model: Model, name: str, case: Case) -> Failure | None:
    """Check one variant on few tokens against the fp32 oracle: output and input gradient."""
    short = Case(case.model, case.layout, GATE_TOKENS)
    variant = model.variant(name, short)
    if isinstance(variant, Failure):
        return variant
    hidden, grad = hidden_and_grad(short, model.config.hidden_size)
    oracle = model.oracle(own_packed(short))

    def check() -> list[tuple[Tensor, Tensor]]:
        expected = oracle.gradients(hidden.float(), grad.float())
        return list(zip(variant.gradients(hidden, grad), expected, strict=True))

    failure, _ = gate(check, TOLERANCE)
    return failure


def measure_case(
    record: Record, watch: Stopwatch, model: Model, case: Case, names: list[str], gates: dict[str, Failure | None]
) -> None:
    """Gate, time and weigh every variant of one case; append its rows."""
    hidden, grad = hidden_and_grad(case, model.config.hidden_size)
    usable: dict[str, Variant] = {}
    failures: dict[str, Failure] = {}
    reference: tuple[Tensor, Tensor] | None = None
    for name in names:
        variant = model.variant(name, case)
        if not isinstance(variant, Failure) and name != "ours_compile":
            key = f"{case.layout}/{name}"
            if key not in gates:
                gates[key] = short_gate(model, name, case)
            variant = gates[key] or variant
        if not isinstance(variant, Failure) and reference is not None:
            failure, _ = gate(partial(full_pairs, variant, hidden, grad, reference), TOLERANCE)
            variant = failure or variant
        elif not isinstance(variant, Failure):
            try:
                reference = variant.gradients(hidden, grad)
            except Exception as error:  # recorded as the row's error
                variant = Failure("error", describe(error))
        if isinstance(variant, Failure):
            failures[name] = variant
        else:
            usable[name] = variant
    del reference
    release_memory()
    passes: dict[str, dict[str, Timing | Failure]] = {}
    passes["forward"] = watch.measure({n: partial(v.call, hidden) for n, v in usable.items()}, seconds=1.0, most=20)
    steps = {n: partial(v.step, hidden, grad) for n, v in usable.items()}
    passes["step"] = watch.measure(steps, seconds=2.0, least=5, most=20)
    memory = {name: step_memory(variant, hidden, grad) for name, variant in usable.items()}
    for direction, results in passes.items():
        add_rows(record, model, case, direction, {**results, **failures}, memory)
    torch._dynamo.reset()
    release_memory()


def full_pairs(
    variant: Variant, hidden: Tensor, grad: Tensor, reference: tuple[Tensor, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Output and input gradient at full length beside those of the first variant that worked."""
    return list(zip(variant.gradients(hidden, grad), reference, strict=True))


def step_memory(variant: Variant, hidden: Tensor, grad: Tensor) -> int | None:
    """Peak extra bytes of a step whose parameter gradients exist already; None when it raises."""
    try:
        variant.step(hidden, grad)
        return peak_extra_bytes(partial(variant.step, hidden, grad, keep_grads=True))
    except Exception as error:  # the timing of the row stands; the memory column stays empty
        print(f"memory not measured: {describe(error)}")
        return None
    finally:
        variant.module.zero_grad(set_to_none=True)
        release_memory()


def add_rows(
    record: Record,
    model: Model,
    case: Case,
    direction: str,
    results: dict[str, Timing | Failure],
    memory: dict[str, int | None],
) -> None:
    """Append the rows of one case and pass with roofline, memory, ratios and verdicts."""
    gemm = costs.gemm_flops(model.config, case.tokens) * (3 if direction == "step" else 1)
    attention = costs.attention_flops(model.config, case.lengths)
    core = sum(attention) if direction == "step" else attention[0]
    peer = best_peer(results)
    for name, result in results.items():
        values: dict[str, Any] = {"gemm_flop": gemm, "attention_flop": core}
        if isinstance(result, Timing):
            roofline = (gemm + core) / record.ceilings["matmul_flop_per_s"] * 1e6
            values |= {"roofline_us": roofline, "roofline_share": roofline / result.us}
            values["flop_per_s"] = (gemm + core) / (result.us * 1e-6)
            if direction == "step":
                values["peak_extra_bytes"] = memory.get(name)
                values["lower_bound_bytes"] = costs.lower_bound_bytes(model.config, case.tokens)
            if peer is not None and not name.startswith("megatron"):
                values["time_over_megatron"] = result.us / results[peer].us  # type: ignore[union-attr]
                values["peer"] = peer
            if name == "ours_auto" and direction == "step":
                values |= verdict(record, case, result, values, memory.get(peer or ""))
        record.add(f"{case.name}/{direction}", name, result, **values)


def best_peer(results: dict[str, Timing | Failure]) -> str | None:
    """Return the faster megatron-core variant that ran, or None."""
    ran = {n: r.us for n, r in results.items() if n.startswith("megatron") and isinstance(r, Timing)}
    return min(ran, key=lambda n: ran[n]) if ran else None


def verdict(
    record: Record, case: Case, result: Timing, values: dict[str, Any], peer_memory: int | None
) -> dict[str, Any]:
    """Compare our step with the targets of its case; a target without its peer stays open."""
    checks: dict[str, bool] = {}
    out: dict[str, Any] = {}
    target = TIME_TARGETS.get((case.model, case.tokens)) if case.layout == "sbhd" else None
    if target is not None and "time_over_megatron" in values:
        checks["time"] = values["time_over_megatron"] <= target
        out["target_time_over_megatron"] = target
    if peer_memory and values["peak_extra_bytes"]:
        out["memory_over_megatron"] = values["peak_extra_bytes"] / peer_memory
        if case.layout == "sbhd":
            checks["memory"] = out["memory_over_megatron"] <= MEMORY_TARGET
    if case.layout == "batch8":
        packed = record.find(f"{case.model}/packed/{case.tokens}/step", "ours_auto")
        if packed and packed["status"] == "ok":
            out["packed_over_batch"] = packed["us"] / result.us
            checks["packed"] = out["packed_over_batch"] <= PACKED_TARGET
    return out | {"checks": checks, "meets_target": all(checks.values()) if checks else None}


def add_breakdowns(record: Record, model: Model, case: Case, names: list[str]) -> list[str]:
    """Profile one step of each variant; append rows and return their lines."""
    lines: list[str] = []
    hidden, grad = hidden_and_grad(case, model.config.hidden_size)
    for name in names:
        variant = model.variant(name, case)
        if isinstance(variant, Failure):
            continue
        row = f"{case.name}/profile"
        try:
            parts = breakdown.profile(partial(variant.step, hidden, grad))
        except Exception as error:  # recorded; the other variants are still profiled
            record.add(row, name, Failure("error", describe(error)))
            continue
        us = parts["total_us"]
        met = parts["shares"]["rest"] <= REST_TARGET if name == "ours_auto" and case.tokens >= 16384 else None
        record.add(row, name, Timing(us, us, us, us, 1), **parts, meets_target=met)
        lines += breakdown.lines(f"{case.name} {name}", parts)
    release_memory()
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Render the timed rows of a record."""
    body = []
    for r in rows:
        if r["row"].endswith("/profile") or r["status"] == "skipped":
            continue
        if r["status"] != "ok":
            body.append([r["row"], r["variant"], r["status"], None, None, None, None, None, r["message"][:60]])
            continue
        extra, bound = r.get("peak_extra_bytes"), r.get("lower_bound_bytes")
        memory = (extra / GIB if extra else None, bound / GIB if bound else None)
        times = (r["us"] / 1e3, r["roofline_us"] / 1e3, r["roofline_share"])
        body.append([r["row"], r["variant"], *times, *memory, r.get("time_over_megatron"), target_text(r)])
    headings = ["row", "variant", "ms", "roofline ms", "share", "extra GiB", "bound GiB", "over megatron", "target"]
    return render_table(headings, body)


def listing(cases: list[Case]) -> str:
    """Render the cases with their FLOPs and lower bounds."""
    from mla_attention.configs import get_preset

    body = []
    for case in cases:
        config = get_preset(case.model, experimental_attention_variant=None)
        gemm, core = 3 * costs.gemm_flops(config, case.tokens), sum(costs.attention_flops(config, case.lengths))
        body.append([case.name, gemm / 1e12, core / 1e12, costs.lower_bound_bytes(config, case.tokens) / GIB])
    return render_table(["row", "GEMM TFLOP a step", "attention TFLOP a step", "bound GiB"], body)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384], help="tokens, multiples of 64")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--profile", action="store_true", help="add a per-kernel breakdown of a step")
    parser.add_argument("--list", action="store_true", help="print the rows and their costs, measure nothing")
    add_output_arguments(parser)
    arguments = parser.parse_args(argv)
    cases = [Case(m, o, t) for m in arguments.models for t in arguments.lengths for o in arguments.layouts]
    if arguments.list:
        print(listing(cases))
        return 0
    require_cuda()
    record, watch = Record("layer", arguments.tag), Stopwatch()
    record.measure_ceilings(watch)
    breakdowns: list[str] = []
    for name in arguments.models:
        try:
            model = Model(name)
        except Exception as error:  # the other model still runs
            record.add(name, "ours", Failure("error", describe(error)))
            continue
        gates: dict[str, Failure | None] = {}
        for case in (c for c in cases if c.model == name):
            try:
                measure_case(record, watch, model, case, arguments.variants, gates)
                if arguments.profile and case.layout != "batch8":
                    breakdowns += add_breakdowns(record, model, case, arguments.variants)
            except Exception as error:  # the other cases still run
                record.add(case.name, "ours", Failure("error", describe(error)))
                release_memory()
            record.write(arguments.out)
        del model
        release_memory()
    path = record.write(arguments.out)
    print("\n".join([*breakdowns, table(record.rows)]))
    print(record.summary(path))
    return record.exit_status()


if __name__ == "__main__":
    raise SystemExit(main())
