"""RoPE kernels against megatron-core's, eager and torch.compile: time, TB/s of necessary bytes, share of the copy rate.

Necessary bytes (bf16, 2 bytes an element; tables are left out):
    in place      read + write of the rotary slice             4 * tokens * heads * emb
    key/value     read kv and k_pe, write key and value        2 * tokens * (heads * (2*nope + 2*value + emb) + emb)
The backward of each moves the same bytes. The query's backward is timed three times: the raw kernel; ``_engine``,
through autograd as inside a model, where nobody else holds the gradient; ``_autograd``, with a gradient that the caller
keeps: ours then leaves it alone and writes a new one, 4 * tokens * heads * width bytes.

    python benchmarks/rope.py [--out DIR] [--rows NAME ...] [--peers megatron eager compile] [--no-startup]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

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
from peers import megatron_rope
from startup import add_rows as add_startup_rows
from startup import table as startup_table

DEVICE = "cuda"
PEERS = ("megatron", "eager", "compile")
TOLERANCE = {
    "ours": 1e-3,
    "eager": 1e-3,
    "compile": 1e-3,
    "megatron": 2e-2,
}  # the peer rotates in bf16 with bf16 tables
LARGE = 200e6  # bytes from which the large-row targets hold
COPY_SHARE = 0.8
KV_COPY_SHARE = 0.93
PACKED_LIMIT = 1.10


@dataclass(frozen=True, slots=True)
class Shape:
    """One measured shape; ``value`` > 0 makes it a key/value split; ``targets``: (forward, backward) speedup.

    ``tables`` of our variants: "own" as the layer's, fp32 and known to repeat; "foreign" the same from elsewhere, read
    whole; "bf16" those that the peer is fed.
    """

    name: str
    tokens: int
    heads: int
    nope: int
    emb: int = 64
    value: int = 0
    rope_first: bool = False
    sequences: int = 0
    tables: str = "own"
    targets: tuple[float, float] = (1.0, 1.0)

    @property
    def width(self) -> int:
        """Channels of a head of the input."""
        return self.nope + (self.value or self.emb)

    @property
    def necessary_bytes(self) -> int:
        """Fewest bytes that one direction moves, in bf16."""
        if self.value:
            return 2 * self.tokens * (self.heads * (2 * self.nope + 2 * self.value + self.emb) + self.emb)
        return 4 * self.tokens * self.heads * self.emb

    @property
    def whole_bytes(self) -> int:
        """Bytes of a backward that leaves the incoming gradient alone: every channel read and written."""
        return 4 * self.tokens * self.heads * self.width


SHAPES = (
    Shape("glm5_q", 16384, 64, 192, targets=(1.7, 2.0)),
    Shape("glm5_q_packed", 16384, 64, 192, sequences=64, targets=(1.7, 2.0)),
    Shape("glm5_q_tp8", 65536, 8, 192, targets=(1.55, 1.9)),
    Shape("glm5_q_tp8_foreign_tables", 65536, 8, 192, tables="foreign"),
    Shape("glm5_q_tp8_packed", 65536, 8, 192, sequences=64, targets=(1.55, 1.9)),
    Shape("dsv3_q", 16384, 128, 128, targets=(1.7, 2.0)),
    Shape("dsv3_q_packed", 16384, 128, 128, sequences=64, targets=(1.7, 2.0)),
    Shape("indexer_q", 65536, 32, 64, rope_first=True, targets=(1.7, 2.0)),
    Shape("indexer_k", 65536, 1, 64, rope_first=True, targets=(3.5, 3.5)),
    Shape("indexer_k_foreign_tables", 65536, 1, 64, rope_first=True, tables="foreign"),
    Shape("indexer_k_bf16_tables", 65536, 1, 64, rope_first=True, tables="bf16", targets=(3.5, 3.5)),
    Shape("glm5_q_tp8_4096", 4096, 8, 192),
    Shape("glm5_kv", 16384, 64, 192, value=256),
    Shape("glm5_kv_tp8", 65536, 8, 192, value=256),
    Shape("glm5_kv_tp8_packed", 65536, 8, 192, value=256, sequences=64),
    Shape("dsv3_kv", 16384, 128, 128, value=128),
    Shape("dsv3_kv_packed", 16384, 128, 128, value=128, sequences=64),
)


def packed_offsets(tokens: int, sequences: int, seed: int = 0) -> list[int]:
    """Return ``sequences + 1`` increasing offsets from 0 to ``tokens``, random lengths of at least one token."""
    cuts = sorted(random.Random(seed).sample(range(1, tokens), sequences - 1))
    return [0, *cuts, tokens]


class Inputs:
    """Random tensors of one shape on the device."""

    def __init__(self, shape: Shape) -> None:
        from mla_attention import RotaryEmbedding

        self.shape = shape
        lead = (shape.tokens,) if shape.sequences else (shape.tokens, 1)
        new = lambda *tail: torch.randn(*lead, *tail, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
        self.x = new(shape.heads, shape.width)
        self.k_pe = new(1, shape.emb) if shape.value else None
        if shape.value:
            self.grads = (new(shape.heads, shape.nope + shape.emb), new(shape.heads, shape.value))
        else:
            self.grads = (new(shape.heads, shape.width),)
        self.cos, self.sin = RotaryEmbedding(shape.emb, 1e4).cos_sin(shape.tokens, device=DEVICE)
        self.cos16, self.sin16 = self.cos.bfloat16(), self.sin.bfloat16()
        if shape.tables == "foreign":
            self.cos, self.sin = self.cos.clone(), self.sin.clone()
        elif shape.tables == "bf16":
            self.cos, self.sin = self.cos16, self.sin16
        self.cu = None
        if shape.sequences:
            offsets = packed_offsets(shape.tokens, shape.sequences)
            self.cu = torch.tensor(offsets, device=DEVICE, dtype=torch.int32)

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Fresh leaves that require gradients, equal to the inputs."""
        tensors = (self.x,) if self.k_pe is None else (self.x, self.k_pe)
        return tuple(t.detach().clone().requires_grad_() for t in tensors)


Forward = Callable[..., tuple[torch.Tensor, ...]]


def own_forward(i: Inputs, module: Any, *, in_place: bool) -> Forward:
    """Return x[, k_pe] -> outputs through a module with this package's names (kernels or twins)."""
    s = i.shape
    if s.value:
        return lambda kv, k_pe: module.fused_mla_rope_kv_split(kv, k_pe, i.cos, i.sin, s.emb, s.nope, s.value, i.cu)
    name = "fused_mla_rope_inplace" if in_place else "fused_mla_rope_out_of_place"
    return lambda t: (getattr(module, name)(t, i.cos, i.sin, s.nope, s.emb, i.cu, rope_first=s.rope_first),)


def peer_forward(i: Inputs, peer: Any) -> Forward:
    """Return x[, k_pe] -> outputs through megatron-core's kernels, fed the bf16 tables that its layer feeds them."""
    s = i.shape
    cos, sin = i.cos16, i.sin16
    if s.value:
        return lambda kv, k_pe: peer.fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, s.emb, s.nope, s.value, i.cu)
    return lambda t: (peer.fused_apply_mla_rope_for_q(t, cos, sin, s.nope, s.emb, i.cu),)


def peer_raw_backward(i: Inputs, peer: Any, grad: torch.Tensor) -> Callable[[], object]:
    """Return a call of megatron-core's in-place query backward without the autograd engine around it."""
    context = SimpleNamespace(
        saved_tensors=(i.cos16, i.sin16),
        qk_head_dim=i.shape.nope,
        emb_dim=i.shape.emb,
        cu_seqlens_q=i.cu,
        rotary_interleaved=False,
        cp_rank=0,
        cp_size=1,
    )
    return partial(peer.ApplyMLARotaryEmbQ.backward, context, grad)


def backward_call(i: Inputs, forward: Forward) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Build the graph once and return a call of its backward with the inputs' output gradients."""
    leaves = i.leaves()
    outputs = forward(*(leaf.clone() for leaf in leaves))  # clone: its backward launches nothing
    grads = tuple(g.clone() for g in i.grads)
    return partial(torch.autograd.grad, outputs, leaves, grads, retain_graph=True)


class Emit(torch.autograd.Function):
    """A scalar whose backward hands a gradient to the function before it and keeps no hold of it, as a GEMM would.

    It is uninitialised memory unless there is a ``source`` to copy, so that no other kernel is timed.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        ctx.like, ctx.source = output.detach(), source
        return output.new_ones(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(ctx.like) if ctx.source is None else ctx.source.clone(), None


def engine_call(i: Inputs, forward: Forward, source: torch.Tensor | None) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a call of the query's backward as it runs inside a model, where nobody else holds the gradient."""
    (leaf,) = i.leaves()
    (output,) = forward(leaf.clone())
    scalar = Emit.apply(output, source)
    return partial(torch.autograd.grad, scalar, leaf, torch.ones_like(scalar), retain_graph=True)


def rotate_tail_reference(i: Inputs, reference: Any) -> Forward:
    """The twin of what the peer computes: it always rotates the last channels of a head."""
    s = i.shape
    if s.value:
        return own_forward(i, reference, in_place=False)
    return lambda t: (reference.fused_mla_rope_out_of_place(t, i.cos, i.sin, s.nope, s.emb, i.cu),)


def forward_values(i: Inputs, forward: Forward) -> tuple[torch.Tensor, ...]:
    """Outputs on a copy of the inputs, so that in-place functions leave them alone."""
    with torch.no_grad():
        return forward(*(leaf.detach() for leaf in i.leaves()))


def load_peer() -> Any:
    """Return megatron-core's fused RoPE module, or a Failure that says why there is none."""
    try:
        return megatron_rope()
    except Exception as error:  # an absent or broken peer only costs its own rows
        return Failure("skipped", f"megatron-core is not importable: {describe(error)}")


def variants_of(i: Inputs, peers: set[str], peer: Any) -> Iterator[tuple[str, str, float, Callable[[], Any], Any]]:
    """Yield (direction, variant, tolerance, timed call, check) of one shape; building may raise inside the call."""
    from mla_attention import fusions
    from mla_attention.fusions import reference

    s = i.shape
    twin, tail = own_forward(i, reference, in_place=False), rotate_tail_reference(i, reference)
    forwards: dict[str, tuple[Forward, Forward]] = {"ours": (own_forward(i, fusions, in_place=True), twin)}
    if "megatron" in peers and not isinstance(peer, Failure):
        forwards["megatron"] = (peer_forward(i, peer), tail)
    if "eager" in peers:
        forwards["eager"] = (own_forward(i, reference, in_place=True), twin)
    if "compile" in peers:
        forwards["compile"] = (torch.compile(own_forward(i, reference, in_place=True), dynamic=False), twin)
    for name, (forward, oracle) in forwards.items():
        inputs = tuple(leaf.detach() for leaf in i.leaves())
        yield "forward", name, TOLERANCE[name], partial(no_grad, forward, inputs), partial(pairs, i, forward, oracle)

    if not s.value:
        grad = i.grads[0].clone()
        tables = (i.cos, i.sin, s.nope, s.emb, i.cu)
        raw = Lazy(lambda: partial(fusions.mla_rope_unapply_raw, grad, *tables, rope_first=s.rope_first, out=grad))
        yield "backward", "ours", TOLERANCE["ours"], raw, partial(raw_pairs, i, raw, grad, twin)
        if "megatron" in forwards:
            theirs = i.grads[0].clone()
            call = peer_raw_backward(i, peer, theirs)
            yield "backward", "megatron", TOLERANCE["megatron"], call, partial(raw_pairs, i, call, theirs, tail)
    suffix = "" if s.value else "_autograd"
    for name, (forward, oracle) in forwards.items():
        if name == "compile":
            continue
        call = Lazy(partial(backward_call, i, forward))
        yield "backward", name + suffix, TOLERANCE[name], call, partial(backward_pairs, i, call, oracle)
        if not s.value and name != "eager":
            with_values, timed = (Lazy(partial(engine_call, i, forward, source)) for source in (i.grads[0], None))
            check = partial(backward_pairs, i, with_values, oracle)
            yield "backward", name + "_engine", TOLERANCE[name], timed, check


def no_grad(forward: Forward, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Call ``forward`` without a graph."""
    with torch.no_grad():
        return forward(*inputs)


def pairs(i: Inputs, forward: Forward, oracle: Forward) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs of ``forward`` beside those of ``oracle``."""
    return zip(forward_values(i, forward), forward_values(i, oracle), strict=True)


def backward_pairs(i: Inputs, call: Callable[[], Any], oracle: Forward) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Input gradients of ``call`` beside those of ``oracle``."""
    return zip(call(), backward_call(i, oracle)(), strict=True)


def raw_pairs(
    i: Inputs, call: Callable[[], object], grad: torch.Tensor, oracle: Forward
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One in-place raw backward on ``grad`` against the twin's autograd, then ``grad`` holds random data again."""
    grad.copy_(i.grads[0])
    call()
    result = grad.clone()
    grad.copy_(i.grads[0])
    return [(result, backward_call(i, oracle)()[0])]


def measure_shape(record: Record, watch: Stopwatch, shape: Shape, peers: set[str], peer: Any) -> None:
    """Gate and time every variant of one shape and append its rows."""
    inputs = Inputs(shape)
    for direction in ("forward", "backward"):
        calls: dict[str, Callable[[], Any]] = {}
        errors: dict[str, float] = {}
        failures: dict[str, Failure] = {}
        for kind, name, tolerance, call, check in variants_of(inputs, peers, peer):
            if kind != direction:
                continue
            failure, errors[name] = gate(check, tolerance)
            if failure is None:
                calls[name] = call
            else:
                failures[name] = failure
        if "megatron" in peers and isinstance(peer, Failure):
            failures["megatron"] = peer
        results = {**failures, **watch.measure(calls, seconds=0.4)}
        del calls
        add_rows(record, shape, direction, results, errors)
        torch._dynamo.reset()
        release_memory()


def add_rows(
    record: Record, shape: Shape, direction: str, results: dict[str, Timing | Failure], errors: dict[str, float]
) -> None:
    """Append the rows of one shape and direction with rates, ratios to the peer and verdicts."""
    row = f"{shape.name}/{direction}"
    for name, result in results.items():
        values: dict[str, Any] = {"relative_error": errors.get(name)}
        if isinstance(result, Timing):
            whole = name == "ours_autograd" and direction == "backward" and not shape.value
            values["bytes"] = shape.whole_bytes if whole else shape.necessary_bytes
            values["bytes_per_s"] = values["bytes"] / (result.us * 1e-6)
            values["copy_share"] = values["bytes_per_s"] / record.ceilings["copy_bytes_per_s"]
            way = next((end for end in ("_autograd", "_engine") if name.endswith(end)), "")
            peer = results.get("megatron" + way)
            if not name.startswith("megatron") and isinstance(peer, Timing):
                values["speedup"] = peer.us / result.us
            if name == "ours":
                values |= verdict(record, shape, direction, result, values)
        record.add(row, name, result, **values)


def verdict(record: Record, shape: Shape, direction: str, result: Timing, values: dict[str, Any]) -> dict[str, Any]:
    """Compare one of our rows with its targets; without a peer's timing the ratio target stays open."""
    target = shape.targets[direction == "backward"]
    checks: dict[str, bool] = {}
    if "speedup" in values:
        checks["speedup"] = values["speedup"] >= target
    elif shape.value:  # the peer's split runs at this share where it compiles
        checks["copy_share"] = values["copy_share"] >= KV_COPY_SHARE
    if shape.necessary_bytes >= LARGE and not shape.value:
        checks["copy_share"] = values["copy_share"] >= COPY_SHARE
    out: dict[str, Any] = {"target_speedup": target}
    if shape.sequences:
        base = record.find(f"{shape.name.removesuffix('_packed')}/{direction}", "ours")
        if base and base["status"] == "ok":
            out["ratio_to_sbhd"] = result.us / base["us"]
            checks["packed"] = out["ratio_to_sbhd"] <= PACKED_LIMIT
    return out | {"checks": checks, "meets_target": all(checks.values()) if checks else None}


def table(rows: list[dict[str, Any]]) -> str:
    """Render the rope rows of a record."""
    body = []
    for r in rows:
        if r["row"].startswith("startup/"):
            continue
        if r["status"] != "ok":
            body.append([r["row"], r["variant"], r["status"], None, None, None, None, r["message"][:60]])
            continue
        rate, share = r["bytes_per_s"] / 1e12, r["copy_share"]
        ratio, packed = r.get("speedup"), r.get("ratio_to_sbhd")
        body.append([r["row"], r["variant"], r["us"], rate, share, ratio, packed, target_text(r)])
    return render_table(["row", "variant", "us", "TB/s", "of copy", "x megatron", "x sbhd", "target"], body)


def listing(shapes: list[Shape]) -> str:
    """Render the shapes and their byte counts."""
    body = [[s.name, s.tokens, s.heads, s.width, s.sequences or None, s.necessary_bytes / 1e6] for s in shapes]
    return render_table(["row", "tokens", "heads", "width", "sequences", "necessary MB"], body)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=[s.name for s in SHAPES], help="only these shapes")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--no-startup", action="store_true", help="leave out the probes in fresh processes")
    parser.add_argument("--list", action="store_true", help="print the rows and their bytes, measure nothing")
    add_output_arguments(parser)
    arguments = parser.parse_args(argv)
    shapes = [s for s in SHAPES if not arguments.rows or s.name in arguments.rows]
    if arguments.list:
        print(listing(shapes))
        return 0
    require_cuda()
    record, watch = Record("rope", arguments.tag), Stopwatch()
    record.measure_ceilings(watch)
    peer = load_peer()
    for shape in shapes:
        try:
            measure_shape(record, watch, shape, set(arguments.peers), peer)
        except Exception as error:  # the other shapes still run
            record.add(f"{shape.name}/forward", "ours", Failure("error", describe(error)))
            release_memory()
        record.write(arguments.out)
    startup = [] if arguments.no_startup else add_startup_rows(record)
    path = record.write(arguments.out)
    print(table(record.rows))
    if startup:
        print(startup_table(startup))
    print(record.summary(path))
    return record.exit_status()


if __name__ == "__main__":
    raise SystemExit(main())
