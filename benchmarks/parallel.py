"""One attention layer on two GPUs against the same layer on one: parity, step times, bytes that travel.

Layouts: ``tp`` heads spread, ``tp_sp`` heads and sequence spread, ``cp`` sequence spread in zigzag chunks, ``fsdp`` two
batches with FSDP2 (twice the tokens of one GPU). A step is forward + backward with fresh parameter gradients, timed
between barriers; the slowest rank counts. Every layout is held to one GPU before it is timed: output, input gradient
and every parameter's gradient, the rotary rows of the kv down projection apart.

Bytes are counted at the collectives, as received by one rank: an all-gather of n ranks (n-1)/n of its result, a
reduce-scatter n-1 times its result, an all-reduce 2(n-1)/n of its tensor. Lower bounds a layer and token, of 2 bytes:
CP forward (Rkv+Dr (+Di))(cp-1)/cp; TP+SP forward (Rq+Rkv+Dr + H)(tp-1)/tp.

    torchrun --nproc-per-node 2 benchmarks/parallel.py [--models glm5 deepseek_v3 glm5_dsa] [--lengths 4096 16384]
                                                       [--long 65536] [--layouts tp tp_sp cp fsdp] [--out DIR]
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from measure import (
    Failure,
    Record,
    Stopwatch,
    Timing,
    add_output_arguments,
    describe,
    release_memory,
    render_table,
    require_cuda,
    summarise,
    target_text,
)
from torch import Tensor, nn

MODELS = ("glm5", "deepseek_v3", "glm5_dsa")
LAYOUTS = {"tp": "tp", "tp_sp": "tp", "cp": "cp", "fsdp": "dp"}  # name -> mesh dim
TOLERANCE = {"dense": 2e-2, "dsa": 1e-1}  # bf16; with dsa a few keys of nearly equal scores are picked apart
LONG_SPEEDUP = 1.7
BYTES_MARGIN = 1.1
GIB = 2.0**30
TIMEOUT = timedelta(minutes=5)


def build_config(model: str, fused: bool) -> Any:
    """The preset of a model; GLM-5 and V3 as dense layers, ``glm5_dsa`` with its indexer and the sparse loss."""
    from mla_attention.configs import get_preset

    if model == "glm5_dsa":
        sparse = {"dsa_indexer_loss_coeff": 1.0, "dsa_indexer_use_sparse_loss": True}
        return get_preset("glm5", apply_rope_fusion=fused, **sparse)
    variant = {} if model == "tiny" else {"experimental_attention_variant": None}
    return get_preset(model, apply_rope_fusion=fused, **variant)


class Rank:
    """This process: its device, and what it tells the others."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        local = int(os.environ["LOCAL_RANK"])
        if self.on_gpu:
            torch.cuda.set_device(local)
        self.device = torch.device("cuda", local) if self.on_gpu else torch.device("cpu")
        dist.init_process_group("nccl" if self.on_gpu else "gloo", timeout=TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def largest(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks."""
        t = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.tolist()

    def agree(self, failure: Failure | None) -> Failure | None:
        """The failure of any rank, so that all skip what one cannot do."""
        found: list[Failure | None] = [None] * self.size
        dist.all_gather_object(found, failure)
        return next((f for f in found if f is not None), None)

    def time(self, call: Callable[[], object], repetitions: int) -> Timing:
        """Median over repetitions of the slowest rank's time, each from a barrier."""
        samples = []
        for _ in range(repetitions):
            dist.barrier()
            if self.on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun = time.perf_counter()
                start.record()
                call()
                end.record()
                host = time.perf_counter() - begun
                torch.cuda.synchronize()
                us = start.elapsed_time(end) * 1e3
            else:
                begun = time.perf_counter()
                call()
                host = time.perf_counter() - begun
                us = host * 1e6
            samples.append(tuple(self.largest([us, host * 1e6])))
        return summarise([(device, host) for device, host in samples])


class Spread:
    """One layer of a model in one layout (``one`` is a whole layer on each GPU), and its step on this rank's rows."""

    def __init__(self, rank: Rank, whole: nn.Module, layout: str) -> None:
        from mla_attention import parallelize

        self.rank, self.layout = rank, layout
        self.layer = copy.deepcopy(whole)
        if layout != "one":
            mesh = dist.device_mesh.init_device_mesh(rank.device.type, (rank.size,), mesh_dim_names=(LAYOUTS[layout],))
            parallelize(self.layer, mesh, sequence_parallel=layout == "tp_sp")

    def cut(self, t: Tensor) -> Tensor:
        """This rank's rows."""
        from mla_attention import shard_sequence_for_cp

        if self.layout == "cp":
            return shard_sequence_for_cp(t, self.rank.rank, self.rank.size)
        return t.chunk(self.rank.size)[self.rank.rank].contiguous() if self.layout == "tp_sp" else t

    def step(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        """Forward and backward; returns the output."""
        self.layer.zero_grad(set_to_none=True)
        hidden.grad = None
        output = self.layer(hidden)[0]
        output.backward(gradient)
        return output.detach()


def full(t: Tensor) -> Tensor:
    """A DTensor's whole value, or the tensor."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative error, Frobenius norms, without a copy in fp32 of all at once."""
    difference = total = 0.0
    for f, w in zip(found.reshape(-1).split(2**26), wanted.reshape(-1).split(2**26), strict=True):
        difference += float((f.float() - w.float()).square().sum(dtype=torch.float64))
        total += float(w.float().square().sum(dtype=torch.float64))
    return (difference / total) ** 0.5 if total else 0.0


class Reference:
    """What one GPU makes of an input: output, input gradient, every parameter's gradient."""

    def __init__(self, one: Spread, hidden: Tensor, gradient: Tensor) -> None:
        self.output = one.step(hidden, gradient)
        self.hidden_grad = hidden.grad.clone()
        self.gradients = {name: p.grad.clone() for name, p in one.layer.named_parameters() if p.grad is not None}

    def errors(self, spread: Spread, output: Tensor, hidden_grad: Tensor) -> dict[str, float]:
        """Relative errors of a layout's step, of this rank."""
        found = {
            "output": distance(output, spread.cut(self.output)),
            "input": distance(hidden_grad, spread.cut(self.hidden_grad)),
        }
        for name, parameter in spread.layer.named_parameters():
            if name not in self.gradients:
                continue
            gradient, wanted = full(parameter.grad), self.gradients[name]
            found[name] = distance(gradient, wanted)
            if name == "linear_kv_down_proj.weight":
                rows = slice(spread.layer.config.kv_lora_rank, None)
                found["rotary_rows"] = distance(gradient[rows], wanted[rows])
        return found


@contextmanager
def received_bytes() -> Iterator[dict[str, int]]:
    """Count what this rank receives, by collective."""
    counts: dict[str, int] = {}
    shares: dict[str, Callable[[Tensor, int], float]] = {
        "all_gather_single": lambda t, n: t.nbytes * (n - 1) / n,
        "all_gather_into_tensor": lambda t, n: t.nbytes * (n - 1) / n,
        "reduce_scatter_single": lambda t, n: t.nbytes * (n - 1),
        "reduce_scatter_tensor": lambda t, n: t.nbytes * (n - 1),
        "all_reduce": lambda t, n: 2 * t.nbytes * (n - 1) / n,
    }
    new = hasattr(dist, "all_gather_single")  # torch 2.13 calls these from the older names

    def counted(name: str) -> Callable:
        original = getattr(dist, name)

        def collective(*args: Any, group: Any = None, **options: Any) -> Any:
            result = (
                args[0] if args else next(options[k] for k in ("output_tensor", "output", "tensor") if k in options)
            )
            counts[name] = counts.get(name, 0) + int(shares[name](result, dist.get_world_size(group)))
            return original(*args, group=group, **options)

        return collective

    with ExitStack() as stack:
        for name in shares:
            older = name in ("all_gather_into_tensor", "reduce_scatter_tensor")
            if hasattr(dist, name) and not (new and older):
                stack.enter_context(mock.patch.object(dist, name, counted(name)))
        yield counts


def count_bytes(spread: Spread, hidden: Tensor, gradient: Tensor) -> dict[str, int]:
    """Bytes received in a forward, in its backward without parameter gradients, and for these."""
    with received_bytes() as forward, torch.no_grad():
        spread.layer(hidden)
    with received_bytes() as both:
        spread.step(hidden, gradient)
    frozen = [p for p in spread.layer.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    with received_bytes() as without:
        spread.step(hidden, gradient)
    for parameter in frozen:
        parameter.requires_grad_(True)
    whole, activations, ahead = (sum(counts.values()) for counts in (both, without, forward))
    return {"forward": ahead, "backward": activations - ahead, "parameter_gradients": whole - activations}


def least_forward_bytes(config: Any, layout: str, tokens: int, size: int, element: int) -> float | None:
    """What a rank must receive in a forward; None where nothing is claimed."""
    latents = config.kv_lora_rank + config.qk_pos_emb_head_dim
    if layout == "cp":
        channels = latents + (config.dsa_indexer_head_dim or 0)
    elif layout == "tp_sp" and config.experimental_attention_variant is None:
        channels = (config.q_lora_rank or config.hidden_size) + latents + config.hidden_size
    else:
        return None
    return tokens * channels * element * (size - 1) / size


def measure_case(
    record: Record, rank: Rank, whole: nn.Module, row: str, tokens: int, layouts: list[str], repetitions: int
) -> None:
    """Hold every layout to one GPU at this length, then time it; append the rows on the first rank."""
    config = whole.config
    dtype = next(whole.parameters()).dtype
    torch.manual_seed(1)
    hidden, gradient = torch.randn(2, tokens, 1, config.hidden_size, device=rank.device, dtype=dtype)
    one: Timing | None = None
    reference: Reference | None = None
    for layout in ("one", *layouts):
        failure, values = None, {}
        timing: Timing | None = None
        try:
            spread = Spread(rank, whole, layout)
            local, local_gradient = spread.cut(hidden).clone().requires_grad_(), spread.cut(gradient)
            if layout == "one":
                reference = Reference(spread, local, local_gradient)
            else:
                output = spread.step(local, local_gradient)
                errors = reference.errors(spread, output, local.grad)
                del output
                failure, values = parity(rank, config, errors)
                counts = count_bytes(spread, local, local_gradient)
                values |= {f"{k}_bytes_per_token": v / tokens for k, v in counts.items() if k != "parameter_gradients"}
                values["parameter_gradient_bytes"] = counts["parameter_gradients"]
                least = least_forward_bytes(config, layout, tokens, rank.size, dtype.itemsize)
                if least:
                    values["forward_bytes_over_least"] = counts["forward"] / least
            if rank.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                spread.step(local, local_gradient)
            timing = rank.time(lambda s=spread, h=local, g=local_gradient: s.step(h, g), repetitions)
            if rank.on_gpu:
                (values["peak_gib"],) = rank.largest([torch.cuda.max_memory_allocated() / GIB])
        except Exception as error:  # recorded; collectives left half done end in the group's timeout
            failure = Failure("error", describe(error))
            print(f"rank {rank.rank}, {row}, {layout}: {failure.message}", flush=True)  # ranks may fail to agree next
        failure = rank.agree(failure)
        result = failure or timing
        if layout == "one" and isinstance(result, Timing):
            one = result
        if rank.rank == 0 and result is not None:
            row_values = {**values, "tokens": tokens * (rank.size if layout == "fsdp" else 1), "layout": layout}
            record.add(row, f"ours_{layout}", result, **row_values, **verdict(result, one, layout, tokens, values))
        spread = local = local_gradient = None
        release_memory()
        if reference is None:
            return


def parity(rank: Rank, config: Any, errors: dict[str, float]) -> tuple[Failure | None, dict[str, Any]]:
    """The largest error over the ranks, and the failure that it is."""
    names = sorted(errors)
    largest = dict(zip(names, rank.largest([errors[name] for name in names]), strict=True))
    worst = max(largest, key=lambda name: largest[name] if largest[name] == largest[name] else float("inf"))
    allowed = TOLERANCE["dense" if config.experimental_attention_variant is None else "dsa"]
    failure = None
    if not largest[worst] <= allowed:
        failure = Failure("wrong", f"{worst}: relative error {largest[worst]:.2e} above {allowed:.0e}; not timed")
    return failure, {"error": largest[worst], "error_of": worst, "rotary_rows_error": largest["rotary_rows"]}


def verdict(
    result: Timing | Failure, one: Timing | None, layout: str, tokens: int, values: dict[str, Any]
) -> dict[str, Any]:
    """Speed-up over one GPU by tokens a second, and which targets are met."""
    if isinstance(result, Failure) or one is None or layout == "one":
        return {}
    out: dict[str, Any] = {"speedup": one.us / result.us * (2 if layout == "fsdp" else 1)}
    checks: dict[str, bool] = {}
    if "forward_bytes_over_least" in values:
        checks["bytes"] = values["forward_bytes_over_least"] <= BYTES_MARGIN
    if layout == "cp" and tokens >= 65536:
        checks["speedup"] = out["speedup"] >= LONG_SPEEDUP
    return out | {"checks": checks, "meets_target": all(checks.values()) if checks else None}


def table(rows: list[dict[str, Any]]) -> str:
    """Render the rows of a record."""
    body = []
    for r in rows:
        if r["status"] != "ok":
            body.append([r["row"], r["variant"], r["status"], None, None, None, None, None, r["message"][:70]])
            continue
        bytes_of = [r.get(f"{kind}_bytes_per_token") for kind in ("forward", "backward")]
        numbers = (r["us"] / 1e3, r.get("speedup"), r.get("error"), *bytes_of, r.get("peak_gib"))
        body.append([r["row"], r["variant"], *numbers, target_text(r)])
    headings = ["row", "variant", "ms", "x one GPU", "error", "B/token fwd", "B/token bwd", "peak GiB", "target"]
    return render_table(headings, body)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=(*MODELS, "tiny"), default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384], help="tokens, multiples of 4")
    parser.add_argument("--long", nargs="*", type=int, default=[65536], help="tokens, for context parallelism alone")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--repetitions", type=int, default=10, help="timed steps; a third of them at the long lengths")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU with gloo, to try the script")
    add_output_arguments(parser)
    arguments = parser.parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        print("needs torchrun: torchrun --nproc-per-node 2 benchmarks/parallel.py")
        return 2
    if not arguments.cpu:
        require_cuda()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rank = Rank()
    record = Record("parallel", arguments.tag)
    record.environment["gpus"] = rank.size if rank.on_gpu else 0
    if rank.on_gpu:
        record.measure_ceilings(Stopwatch())
        dist.barrier()
    for model in arguments.models:
        whole = build_layer(model, rank)
        for tokens in arguments.lengths:
            run_case(record, rank, whole, model, tokens, arguments.layouts, arguments.repetitions, arguments)
        for tokens in arguments.long if "cp" in arguments.layouts else []:
            run_case(record, rank, whole, model, tokens, ["cp"], max(arguments.repetitions // 3, 1), arguments)
        del whole
        release_memory()
    status = 0
    if rank.rank == 0:
        path = record.write(arguments.out)
        print(table(record.rows))
        print(record.summary(path))
        status = record.exit_status()
    dist.barrier()
    dist.destroy_process_group()
    return status


def build_layer(model: str, rank: Rank) -> nn.Module:
    """The whole layer of a model, with norm weights that are not 1, the same on every rank."""
    from mla_attention import MLASelfAttention

    torch.manual_seed(0)
    config = build_config(model, fused=rank.on_gpu)
    layer = MLASelfAttention(config, device=rank.device, dtype=torch.bfloat16 if rank.on_gpu else torch.float32)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.normal_(1.0, 0.1)
    return layer


def run_case(
    record: Record,
    rank: Rank,
    whole: nn.Module,
    model: str,
    tokens: int,
    layouts: list[str],
    repetitions: int,
    arguments: argparse.Namespace,
) -> None:
    """Measure one row, say so, and write what there is."""
    start = time.perf_counter()
    measure_case(record, rank, whole, f"{model}/{tokens}", tokens, layouts, repetitions)
    if rank.rank == 0:
        record.write(arguments.out)
        print(f"{model}/{tokens}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
