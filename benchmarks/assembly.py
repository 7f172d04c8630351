"""Up-projection + RoPE + assembly of key and value: written in place by batched GEMMs, or one GEMM and a split kernel.

Floor: the GEMM's FLOPs, forward 2 * T * Rkv * n * (Dn + Dv), backward twice that, at the bf16 matmul rate of the run.
Peer: the same GEMM followed by megatron-core's split kernel (bf16 tables); where that does not compile (GLM-5's width
192) our own split, which runs at the copy rate, stands in for it, and the row says so.

    python benchmarks/assembly.py [--rows NAME ...] [--out DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import peers
import torch
from measure import (
    Failure,
    Lazy,
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
from torch import Tensor

DEVICE = "cuda"
TOLERANCE = {"ours_gemm": 1e-2, "ours_split": 1e-2, "megatron": 2e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape; ``targets`` are (forward, backward) upper bounds of our time over the peer's."""

    name: str
    model: str
    heads: int
    tokens: int
    targets: tuple[float, float]


SHAPES = (
    Shape("glm5", "glm5", 64, 16384, (0.70, 0.86)),
    Shape("glm5_tp8", "glm5", 8, 65536, (0.85, 0.93)),
    Shape("dsv3", "deepseek_v3", 128, 16384, (0.70, 0.86)),
)


class Inputs:
    """Latent, shared rotary key, weight, tables and output gradients of one shape."""

    def __init__(self, shape: Shape) -> None:
        from mla_attention.configs import get_preset
        from mla_attention.layers.torch_layers import TorchLayers
        from mla_attention.rotary import build_rotary

        self.shape = shape
        overrides: dict[str, Any] = {"num_attention_heads": shape.heads, "experimental_attention_variant": None}
        self.config = partial(get_preset, shape.model, **overrides)
        config = self.config()
        self.dims = (config.qk_pos_emb_head_dim, config.qk_head_dim, config.v_head_dim)
        emb, k_dim, v_dim = self.dims
        new = lambda *tail: torch.randn(shape.tokens, 1, *tail, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
        self.latent, self.k_pe = new(config.kv_lora_rank).requires_grad_(), new(emb).requires_grad_()
        layers = TorchLayers(DEVICE, torch.bfloat16)
        self.up_proj = layers.linear(config.kv_lora_rank, shape.heads * (k_dim + v_dim), init_std=0.02)
        self.cos, self.sin = build_rotary(config).cos_sin(shape.tokens, device=torch.device(DEVICE))
        self.grads = (new(shape.heads, k_dim + emb), new(shape.heads, v_dim))
        self.flops = 2 * shape.tokens * config.kv_lora_rank * shape.heads * (k_dim + v_dim)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What takes gradients."""
        return self.latent, self.k_pe, self.up_proj.weight


Assemble = Callable[[], tuple[Tensor, Tensor]]


def ours(i: Inputs, way: str, *, fused: bool = True) -> Assemble:
    """Our assembly by one of its ways; unfused it is the oracle."""
    from mla_attention.key_value_assembly import KeyValueAssembly
    from mla_attention.token_layout import TokenLayout

    assemble = KeyValueAssembly(i.config(apply_rope_fusion=fused, kv_assembly=way))
    tokens = TokenLayout(1, i.shape.tokens, i.cos, i.sin)
    return lambda: assemble(i.latent, i.k_pe, i.up_proj, tokens)


def megatron(i: Inputs) -> Assemble:
    """The GEMM and megatron-core's split kernel after it."""
    rope = peers.megatron_rope()
    emb, k_dim, v_dim = i.dims
    cos, sin = i.cos.bfloat16(), i.sin.bfloat16()

    def assemble() -> tuple[Tensor, Tensor]:
        kv = torch.nn.functional.linear(i.latent, i.up_proj.weight).unflatten(-1, (i.shape.heads, k_dim + v_dim))
        return rope.fused_apply_mla_rope_for_kv(kv, i.k_pe.unsqueeze(-2), cos, sin, emb, k_dim, v_dim)

    return assemble


def backward(i: Inputs, assemble: Assemble) -> Callable[[], tuple[Tensor, ...]]:
    """Build the graph once and return a call of its backward."""
    return partial(torch.autograd.grad, assemble(), i.leaves, i.grads, retain_graph=True)


def pairs(i: Inputs, assemble: Assemble, oracle: Assemble) -> list[tuple[Tensor, Tensor]]:
    """Key, value and all gradients beside the oracle's."""
    left, right = ((*f(), *backward(i, f)()) for f in (assemble, oracle))
    return list(zip(left, right, strict=True))


def measure_shape(record: Record, watch: Stopwatch, shape: Shape) -> None:
    """Gate and time every variant of one shape, both directions."""
    inputs = Inputs(shape)
    oracle = ours(inputs, "split", fused=False)
    builders: dict[str, Callable[[], Assemble]] = {
        "ours_gemm": partial(ours, inputs, "gemm"),
        "ours_split": partial(ours, inputs, "split"),
        "megatron": partial(megatron, inputs),
    }
    failures: dict[str, Failure] = {}
    usable: dict[str, Assemble] = {}
    for name, build in builders.items():
        try:
            assemble = build()
        except Exception as error:  # an absent peer costs its own rows only
            failures[name] = Failure("skipped" if isinstance(error, ImportError) else "error", describe(error))
            continue
        failure, _ = gate(partial(pairs, inputs, assemble, oracle), TOLERANCE[name])
        if failure is None:
            usable[name] = assemble
        else:
            failures[name] = failure
    backwards = {n: Lazy(partial(backward, inputs, f)) for n, f in usable.items()}
    for index, (direction, calls) in enumerate((("forward", usable), ("backward", backwards))):
        results = {**watch.measure(calls, seconds=0.5), **failures}
        add_rows(record, shape, direction, results, inputs.flops * (index + 1))


def add_rows(record: Record, shape: Shape, direction: str, results: dict[str, Timing | Failure], flops: int) -> None:
    """Append the rows of one direction with the floor and the ratio to the peer."""
    peer = "megatron" if isinstance(results.get("megatron"), Timing) else "ours_split"
    base = results.get(peer)
    for name, result in results.items():
        values: dict[str, Any] = {"flop": flops}
        if isinstance(result, Timing):
            values["roofline_us"] = flops / record.ceilings["matmul_flop_per_s"] * 1e6
            if isinstance(base, Timing) and name != peer:
                values |= {"time_over_peer": result.us / base.us, "peer": peer}
            if name == "ours_gemm" and "time_over_peer" in values:
                met = values["time_over_peer"] <= shape.targets[direction == "backward"]
                values |= {"checks": {"time": met}, "meets_target": met}
        record.add(f"assembly/{shape.name}/{direction}", name, result, **values)


def table(rows: list[dict[str, Any]]) -> str:
    """Render the assembly rows."""
    body = []
    for r in rows:
        if r["status"] != "ok":
            body.append([r["row"], r["variant"], r["status"], None, None, None, r["message"][:60]])
            continue
        ratio = (r.get("time_over_peer"), r.get("peer"))
        body.append([r["row"], r["variant"], r["us"], r["roofline_us"], *ratio, target_text(r)])
    return render_table(["row", "variant", "us", "GEMM floor us", "over peer", "peer", "target"], body)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=[s.name for s in SHAPES])
    add_output_arguments(parser)
    arguments = parser.parse_args(argv)
    require_cuda()
    record, watch = Record("assembly", arguments.tag), Stopwatch()
    record.measure_ceilings(watch)
    for shape in SHAPES:
        if arguments.rows and shape.name not in arguments.rows:
            continue
        try:
            measure_shape(record, watch, shape)
        except Exception as error:  # the other shapes still run
            record.add(f"assembly/{shape.name}", "ours_gemm", Failure("error", describe(error)))
        release_memory()
    path = record.write(arguments.out)
    print(table(record.rows))
    print(record.summary(path))
    return record.exit_status()


if __name__ == "__main__":
    raise SystemExit(main())
