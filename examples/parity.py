"""Fused against unfused MLASelfAttention on the same weights: forward and every gradient, with an fp64 oracle beside.

    python examples/parity.py --preset glm5
    python examples/parity.py --preset deepseek_v3 --packed --plot parity.png
    python examples/parity.py --preset glm5 --mode dsa

A tensor passes when fused and unfused differ by at most a fraction of its largest value (1e-2 in bf16, 1e-3 in fp16,
1e-5 in fp32), and when fused is no further from fp64 than unfused is, with leeway for sums in another order: 10 %, a
fiftieth of the dtype's epsilon and four of fp32's. A scalar has no norm over many errors, and the unfused one's may be
0 by chance: there it is sixteen of fp32's.
Exit status 0: all pass, 1: some fail, 2: the arguments do not fit together.

Without a GPU the kernels run in Triton's interpreter on small shapes, not in bf16: it truncates where a GPU
rounds. In dsa mode the three layers attend to the keys that the fp64 layer selects, since two roundings of
nearly equal scores may select different keys; how far the selections agree is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

from torch import Tensor

from mla_attention import MLASelfAttention, PackedSeqParams
from mla_attention.configs import PRESETS, ConfigError, MLAConfig, get_preset

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGEST_DIFFERENCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}
CPU_DIMS = {"hidden_size": 128, "q_lora_rank": 48, "kv_lora_rank": 64}
CPU_DSA_DIMS = {"dsa_indexer_n_heads": 4}
CPU_INIT_STD = 0.1  # narrow layers need larger weights, else attention is uniform and shows no fault of the rotation


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor of the fused and the unfused layer."""

    name: str
    max_abs: float
    max_ulp: int
    relative: float
    fused_error: float
    unfused_error: float
    passed: bool


def ordered_bits(t: Tensor) -> Tensor:
    """Map floats to integers such that neighbouring floats are neighbouring integers (+0 and -0 coincide)."""
    width = {2: torch.int16, 4: torch.int32}[t.element_size()]
    bits = t.contiguous().view(width).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * t.element_size() - 1) - 1)), bits)


def ulp_distance(a: Tensor, b: Tensor) -> int:
    """Return how many representable values lie between a and b at most, elementwise."""
    return int((ordered_bits(a) - ordered_bits(b)).abs().max()) if a.numel() else 0


def distance(a: Tensor, oracle: Tensor) -> float:
    """Return ``|a - oracle| / |oracle|`` in fp64, Frobenius norms."""
    norm = float(oracle.double().norm())
    off = float((a.double() - oracle.double()).norm())
    return off / norm if norm else off


def compare(name: str, fused: Tensor, unfused: Tensor, oracle: Tensor) -> Comparison:
    """Compare one tensor of the three layers."""
    difference = float((fused.double() - unfused.double()).abs().max()) if fused.numel() else 0.0
    largest = float(unfused.double().abs().max()) if unfused.numel() else 0.0
    relative = difference / largest if largest else difference
    fused_error, unfused_error = distance(fused, oracle), distance(unfused, oracle)
    ulp = ulp_distance(fused, unfused)
    if not oracle.any():  # nothing to be relative to: both are noise, and small
        passed = max(difference, fused_error) <= LARGEST_DIFFERENCE[fused.dtype]
        return Comparison(name, difference, ulp, relative, fused_error, unfused_error, passed)
    near = relative <= LARGEST_DIFFERENCE[fused.dtype]
    leeway = torch.finfo(fused.dtype).eps / 50 + (16 if fused.numel() == 1 else 4) * torch.finfo(torch.float32).eps
    accurate = fused_error <= 1.1 * unfused_error + leeway
    return Comparison(name, difference, ulp, relative, fused_error, unfused_error, near and accurate)


def packed_lengths(tokens: int) -> list[int]:
    """Return lengths that sum to ``tokens``: odd ones, an empty one, one single token."""
    first = tokens // 3 | 1
    return [first, 0, 1, tokens - first - 1]


def build_layers(
    config: Callable[..., MLAConfig], dtype: torch.dtype, device: str
) -> dict[str, tuple[MLASelfAttention, torch.dtype]]:
    """Build the fused, unfused and fp64 layers on one set of weights; norm weights are random too."""
    fused = MLASelfAttention(config(apply_rope_fusion=True), device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in fused.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    unfused = MLASelfAttention(config(apply_rope_fusion=False), device=device, dtype=dtype)
    exact = config(apply_rope_fusion=False, core_attention_backend="reference")
    oracle = MLASelfAttention(exact, device=device, dtype=torch.float64)
    for layer in (unfused, oracle):
        layer.load_state_dict(fused.state_dict())
    if fused.config.experimental_attention_variant == "dsa":
        for layer, kernels in ((fused, "triton"), (unfused, "torch"), (oracle, "torch")):
            layer.core_attention.kernels = kernels
    return {"fused": (fused, dtype), "unfused": (unfused, dtype), "oracle": (oracle, torch.float64)}


def gradients(layer: MLASelfAttention, only: str = "") -> dict[str, Tensor]:
    """Return the parameter gradients by name and forget them."""
    found = {f"d {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None and only in name}
    layer.zero_grad(set_to_none=True)
    return found


def run_layer(
    layer: MLASelfAttention, hidden: Tensor, grad: Tensor, packed: PackedSeqParams | None, topk_indices: Tensor | None
) -> dict[str, Tensor]:
    """Return query, key, value, output and all gradients of one forward and backward."""
    leaf = hidden.detach().clone().requires_grad_()
    with torch.no_grad():
        query, key, value, *_ = layer.get_query_key_value_tensors(leaf, packed_seq_params=packed)
    sparse = {} if topk_indices is None else {"topk_indices": topk_indices}
    output, _ = layer(leaf, packed_seq_params=packed, **sparse)
    output.backward(grad)
    tensors = {"query": query, "key": key, "value": value, "output": output.detach(), "d hidden": leaf.grad}
    return {name: t for name, t in tensors.items() if t is not None} | gradients(layer)


def run_indexer(layer: MLASelfAttention, hidden: Tensor, packed: PackedSeqParams | None) -> dict[str, Tensor]:
    """Return the indexer's selection, its loss and the gradients of its parameters."""
    _, _, aux = layer(hidden, packed_seq_params=packed, return_aux=True)
    aux.indexer_loss.backward()
    loss = aux.indexer_loss.detach().to(hidden.dtype).reshape(1)
    return {"topk_indices": aux.topk_indices, "indexer loss": loss} | gradients(layer, "indexer")


def selection_overlap(a: Tensor, b: Tensor) -> float:
    """Return the fraction of the keys selected by ``b`` that ``a`` selects too."""
    both = total = 0
    for left, right in zip(a.flatten(0, -2), b.flatten(0, -2), strict=True):
        chosen = right[right >= 0]
        both += int(torch.isin(chosen, left).sum())
        total += chosen.numel()
    return both / total if total else 1.0


def compare_layers(
    config: Callable[..., MLAConfig], dtype: torch.dtype, device: str, tokens: int, *, packed: bool, seed: int
) -> list[Comparison]:
    """Build the layers, run them on the same random input and compare every tensor."""
    torch.manual_seed(seed)
    layers = build_layers(config, dtype, device)
    settings = layers["fused"][0].config
    params = None
    if packed:
        offsets = torch.tensor([0, *packed_lengths(tokens)]).cumsum(0)
        params = PackedSeqParams(offsets.to(device=device, dtype=torch.int32))
    shape = (tokens, 1, settings.hidden_size) if packed else (tokens // 2, 2, settings.hidden_size)
    hidden, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    sparse = settings.experimental_attention_variant == "dsa"
    chosen: dict[str, dict[str, Tensor]] = {}
    topk_indices = None
    if sparse:
        chosen = {n: run_indexer(layer, hidden.to(kind), params) for n, (layer, kind) in layers.items()}
        selections = {n: tensors.pop("topk_indices") for n, tensors in chosen.items()}
        topk_indices = selections["oracle"]
        for name in ("fused", "unfused"):
            share = selection_overlap(selections[name], topk_indices)
            print(f"{name}: {share:.2%} of the keys that fp64 selects are selected")
    results = {
        n: run_layer(layer, hidden.to(kind), grad.to(kind), params, topk_indices) | chosen.get(n, {})
        for n, (layer, kind) in layers.items()
    }
    if any(tensors.keys() != results["oracle"].keys() for tensors in results.values()):
        raise RuntimeError(f"the layers gave different tensors: {[sorted(t) for t in results.values()]}")
    return [
        compare(name, results["fused"][name], results["unfused"][name], oracle)
        for name, oracle in results["oracle"].items()
    ]


def render(comparisons: list[Comparison]) -> str:
    """Return the comparisons as a table, one line a tensor."""
    width = max(len(c.name) for c in comparisons)
    lines = [f"{'tensor':<{width}}  {'max abs':>9}  {'max ulp':>8}  {'relative':>9}  {'fused-fp64':>10}  unfused-fp64"]
    for c in comparisons:
        errors = f"{c.fused_error:>10.2e}  {c.unfused_error:>12.2e}"
        verdict = "pass" if c.passed else "FAIL"
        lines.append(f"{c.name:<{width}}  {c.max_abs:>9.2e}  {c.max_ulp:>8d}  {c.relative:>9.2e}  {errors}  {verdict}")
    return "\n".join(lines)


def plot(comparisons: list[Comparison], title: str, path: str) -> None:
    """Draw both errors against fp64, one pair of bars a tensor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(comparisons) + 1.4), layout="constrained")
    rows = range(len(comparisons))
    axes.barh([r - 0.2 for r in rows], [c.unfused_error for c in comparisons], 0.38, label="unfused", color="#b0b7c3")
    axes.barh([r + 0.2 for r in rows], [c.fused_error for c in comparisons], 0.38, label="fused", color="#2f6fde")
    axes.set_yticks(list(rows), [c.name for c in comparisons], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("relative error against fp64")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def overrides_of(arguments: argparse.Namespace, on_gpu: bool) -> dict[str, Any]:
    """Return the config overrides that the arguments and the device ask for."""
    preset = get_preset(arguments.preset)
    values: dict[str, Any] = {"kv_assembly": arguments.assembly}
    if arguments.mode == "dense":
        values["experimental_attention_variant"] = None
    else:
        values |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": preset.dsa_indexer_n_heads or 4,
            "dsa_indexer_head_dim": preset.dsa_indexer_head_dim or max(32, preset.qk_pos_emb_head_dim),
            "dsa_indexer_topk": max(1, arguments.seq_len // 8),
            "dsa_indexer_loss_coeff": 1.0,
        }
        values |= {} if on_gpu else CPU_DSA_DIMS
    heads = arguments.heads
    if not on_gpu:
        values["init_method_std"] = CPU_INIT_STD
    if not on_gpu and arguments.preset != "tiny":
        values |= {k: v for k, v in CPU_DIMS.items() if getattr(preset, k) is not None}
        heads = heads or 4
    if heads:
        values["num_attention_heads"] = heads
    return values


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; sizes that are not given depend on the device."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--mode", choices=("dense", "dsa"), default="dense")
    parser.add_argument("--packed", action="store_true", help="four sequences in one row of tokens (thd)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")
    parser.add_argument("--seq-len", type=int, default=512 if on_gpu else 32, help="tokens in all")
    parser.add_argument("--heads", type=int, help="attention heads instead of the preset's")
    parser.add_argument("--assembly", choices=("auto", "split", "gemm"), default="auto", help="config.kv_assembly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw the errors against fp64")
    arguments = parser.parse_args(argv)
    if not on_gpu and arguments.dtype == "bf16":
        parser.error("--dtype: given bf16 without a GPU (Triton's interpreter truncates), allowed are fp32 and fp16")
    if arguments.heads is not None and arguments.heads < 1:
        parser.error(f"--heads: given {arguments.heads}, allowed are integers >= 1")
    if arguments.plot and not Path(arguments.plot).resolve().parent.is_dir():
        parser.error(f"--plot: given {arguments.plot!r}, allowed is a file in a folder that exists")
    if arguments.seq_len < 8 or arguments.seq_len % 2:
        parser.error(f"--seq-len: given {arguments.seq_len}, allowed are even numbers from 8 on")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    arguments = parse(argv)
    on_gpu = torch.cuda.is_available()
    overrides = overrides_of(arguments, on_gpu)
    if not on_gpu:
        shrunk = {k: v for k, v in overrides.items() if k in (*CPU_DIMS, *CPU_DSA_DIMS, "num_attention_heads")}
        print(
            f"no GPU: the kernels run in Triton's interpreter, {arguments.seq_len} tokens, {shrunk or 'nothing shrunk'}"
        )
    try:
        config = lambda **more: get_preset(arguments.preset, **{**overrides, **more})  # noqa: E731
        comparisons = compare_layers(
            config,
            DTYPES[arguments.dtype],
            "cuda" if on_gpu else "cpu",
            arguments.seq_len,
            packed=arguments.packed,
            seed=arguments.seed,
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    layout = "packed" if arguments.packed else "sbhd"
    title = f"{arguments.preset} {arguments.mode}, {layout}, {arguments.dtype}, {arguments.seq_len} tokens"
    failed = [c.name for c in comparisons if not c.passed]
    print(render(comparisons))
    print(f"{title}: " + (f"{len(failed)} of {len(comparisons)} tensors fail" if failed else "all pass"))
    if arguments.plot:
        plot(comparisons, title, arguments.plot)
        print(f"wrote {arguments.plot}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
