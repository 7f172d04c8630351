"""megatron-core's own MLASelfAttention (Transformer Engine), a training step before and after `patch()`.

Variants, all with the same weights: ``megatron_unfused``; ``megatron_fused`` on Megatron's RoPE kernels, which for
GLM-5 do not compile; ``patched_fused``, the same module on ours; ``ours_te`` and ``ours_torch``, our layer on both back
ends. They take turns within one run: the functions that `patch()` replaces are exchanged around each call.

    python benchmarks/megatron_patch.py [--models deepseek_v3 glm5] [--lengths 4096 16384] [--out DIR] [--tag TAG]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

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
    release_memory,
    render_table,
    require_cuda,
)
from torch import Tensor, nn

DEVICE = "cuda"
MODELS = ("deepseek_v3", "glm5")
VARIANTS = ("megatron_unfused", "megatron_fused", "patched_fused", "ours_te", "ours_torch")
GATE_TOKENS = 512
TOLERANCE = 2e-2


class Exchange:
    """The functions that `patch()` replaces, put in and out without a search."""

    def __init__(self) -> None:
        from mla_attention.integrations.megatron import patch, unpatch

        self.symbols = [tuple(symbol.rsplit(".", 1)) for symbol in patch()]
        self.ours = self._held()
        unpatch()
        self.theirs = self._held()

    def _held(self) -> list[Any]:
        return [getattr(sys.modules[module], name) for module, name in self.symbols]

    def put(self, ours: bool) -> None:
        """Make Megatron use our functions, or its own."""
        for (module, name), function in zip(self.symbols, self.ours if ours else self.theirs, strict=True):
            setattr(sys.modules[module], name, function)


class Variant:
    """A module and how to call it."""

    def __init__(self, module: nn.Module, exchange: Exchange, patched: bool, **arguments: Any) -> None:
        self.module, self.exchange, self.patched, self.arguments = module, exchange, patched, arguments

    def forward(self, hidden: Tensor) -> Tensor:
        """Output on the functions of this variant."""
        self.exchange.put(self.patched)
        return self.module(hidden, **self.arguments)[0]

    def step(self, hidden: Tensor, grad: Tensor) -> None:
        """Forward and backward with fresh gradients."""
        self.module.zero_grad(set_to_none=True)
        hidden.grad = None
        self.forward(hidden).backward(grad)

    def gradients(self, hidden: Tensor, grad: Tensor) -> list[Tensor]:
        """Output, input gradient and the gradient of the shared down projection."""
        leaf = hidden.detach().clone().requires_grad_()
        output = self.forward(leaf)
        down = self.module.get_parameter("linear_kv_down_proj.weight")
        return [output.detach(), *torch.autograd.grad(output, [leaf, down], grad)]


def build_variants(name: str, exchange: Exchange) -> dict[str, Variant | Failure]:
    """Every variant of a model, or why it could not be built."""
    from mla_attention import MLASelfAttention
    from mla_attention.checkpoint import to_megatron_state_dict
    from mla_attention.configs import get_preset

    config = get_preset(name, experimental_attention_variant=None, apply_rope_fusion=True)
    base = MLASelfAttention(config, device=DEVICE, dtype=torch.bfloat16)
    weights = to_megatron_state_dict(base, fused_norm=True)

    def ours_te() -> nn.Module:
        module = MLASelfAttention(config, backend="te", device=DEVICE, dtype=torch.bfloat16)
        module.load_state_dict(base.state_dict())
        return module

    theirs: dict[str, Any] = {"attention_mask": None}
    unfused = partial(peers.megatron_layer, config, weights, fused=False)
    fused = partial(peers.megatron_layer, config, weights, fused=True)
    builders: dict[str, tuple[Callable[[], nn.Module], bool, dict[str, Any]]] = {
        "megatron_unfused": (unfused, False, theirs),
        "megatron_fused": (fused, False, theirs),
        "patched_fused": (fused, True, theirs),
        "ours_te": (ours_te, False, {}),
        "ours_torch": (lambda: base, False, {}),
    }
    built: dict[str, Variant | Failure] = {}
    for variant, (build, patched, arguments) in builders.items():
        try:
            built[variant] = Variant(build(), exchange, patched, **arguments)
        except Exception as error:  # recorded as the row's error
            built[variant] = Failure("error", describe(error))
    return built


def measure_model(record: Record, watch: Stopwatch, name: str, lengths: list[int], exchange: Exchange) -> None:
    """Gate every variant against Megatron's unfused one, then time forward and step; append the rows."""
    variants = build_variants(name, exchange)
    reference = variants["megatron_unfused"]
    if isinstance(reference, Failure):
        raise RuntimeError(f"megatron-core's unfused layer: {reference.message}")
    width = reference.module.config.hidden_size
    make = lambda tokens: torch.randn(tokens, 1, width, device=DEVICE, dtype=torch.bfloat16)  # noqa: E731
    short, short_grad = make(GATE_TOKENS), make(GATE_TOKENS)
    expected = reference.gradients(short, short_grad)
    errors: dict[str, float] = {}
    for variant, built in variants.items():
        if isinstance(built, Variant):
            check = lambda built=built: zip(built.gradients(short, short_grad), expected, strict=True)  # noqa: E731
            failure, errors[variant] = gate(check, TOLERANCE)
            variants[variant] = failure or built
    for tokens in lengths:
        hidden, grad = make(tokens).requires_grad_(), make(tokens)
        usable = {variant: built for variant, built in variants.items() if isinstance(built, Variant)}
        passes = {
            "forward": {variant: partial(built.forward, hidden) for variant, built in usable.items()},
            "step": {variant: partial(built.step, hidden, grad) for variant, built in usable.items()},
        }
        for direction, calls in passes.items():
            results = {**variants, **watch.measure(calls, seconds=3.0, least=7, most=30)}
            for variant in VARIANTS:
                result: Any = results[variant]
                values = {"gate_error": errors.get(variant)}
                for other in ("megatron_fused", "megatron_unfused"):
                    base: Any = results[other]
                    if isinstance(result, Timing) and isinstance(base, Timing):
                        values[f"time_over_{other}"] = result.us / base.us
                record.add(f"{name}/sbhd/{tokens}/{direction}", variant, result, **values)
        for built in usable.values():
            built.module.zero_grad(set_to_none=True)
        release_memory()
    exchange.put(False)


def table(rows: list[dict[str, Any]]) -> str:
    """Render the rows of a record."""
    body = []
    for r in rows:
        ms = r["us"] / 1e3 if r["status"] == "ok" else None
        note = r.get("message", "")[:50]
        ratios = (r.get("time_over_megatron_fused"), r.get("time_over_megatron_unfused"))
        body.append([r["row"], r["variant"], r["status"], ms, *ratios, r.get("gate_error"), note])
    return render_table(
        ["row", "variant", "status", "ms", "over fused", "over unfused", "error to unfused", "note"], body
    )


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384], help="tokens")
    add_output_arguments(parser)
    arguments = parser.parse_args(argv)
    require_cuda()
    record, watch = Record("megatron_patch", arguments.tag), Stopwatch()
    record.measure_ceilings(watch)
    try:
        exchange = Exchange()
    except RuntimeError as error:
        print(error)
        return 2
    for name in arguments.models:
        try:
            measure_model(record, watch, name, arguments.lengths, exchange)
        except Exception as error:  # the other model still runs
            record.add(name, "ours", Failure("error", describe(error)))
        record.write(arguments.out)
        release_memory()
    path = record.write(arguments.out)
    print(table(record.rows))
    print(record.summary(path))
    return record.exit_status()


if __name__ == "__main__":
    raise SystemExit(main())
