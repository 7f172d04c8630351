"""Train a byte-level language model of MLA layers on real text, and print loss, tokens per second and peak memory.

    python examples/train_step.py                                   tiny model on a CPU, one GLM-5 layer on a GPU
    python examples/train_step.py --packed --recompute              packed documents, up projections recomputed
    python examples/train_step.py --preset glm5 --mode dense_warmup the indexer alone, then --mode sparse
    torchrun --nproc-per-node 4 examples/train_step.py --tp 2 --cp 2 --sequence-parallel --fsdp

The objective is the mean next-byte cross entropy in nats; `sparse` adds the indexer's loss, `dense_warmup` is the
indexer's loss alone.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from byte_language_model import ByteLanguageModel
from byte_text import Batch, BatchSource, load_text
from train_options import build_config, build_parser, resolve
from train_parallel import Ranks, parallelize_model, start_ranks

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MasterWeightAdamW:
    """AdamW on fp32 copies of the parameters: bf16 steps smaller than half an ulp are not lost.

    fp32 parameters are stepped directly. The rate rises over the first tenth of the steps (five at least), then
    falls along a cosine to a tenth of its peak.
    """

    def __init__(self, parameters: list[nn.Parameter], *, lr: float, steps: int) -> None:
        self.parameters = parameters
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in parameters]
        # one fused update takes tensors of one kind: plain ones apart from each mesh's
        kinds: dict[object, list[Tensor]] = {}
        for master in self.masters:
            kinds.setdefault(master.device_mesh if isinstance(master, DTensor) else None, []).append(master)
        groups = [{"params": group} for group in kinds.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        warmup = max(steps // 10, 5)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        self.schedule.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
            parameter.grad = None


def objective(model: nn.Module, batch: Batch, ranks: Ranks, *, indexer_only: bool) -> tuple[Tensor, Tensor]:
    """The rank's share of the training loss, to call backward on, and the loss of the whole sequence to print."""
    part = ranks.local_part(batch)
    logits, indexer_loss = model(part.inputs, part.packed)
    if indexer_only:
        return indexer_loss, indexer_loss.detach()
    summed = nn.functional.cross_entropy(logits.flatten(0, 1).float(), part.targets.flatten(), reduction="sum")
    share = summed / batch.targets.numel()
    whole = ranks.sum_over_sequence(share)
    if indexer_loss is None:
        return share, whole
    return share + indexer_loss, whole + indexer_loss.detach()


def train(
    model: nn.Module,
    batches: BatchSource,
    ranks: Ranks,
    *,
    args: argparse.Namespace,
    report: Callable[[int, float, float], None],
) -> list[float]:
    """Run the steps, call `report(step, loss, tokens per second)` on the logged ones, and return every step's loss."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = MasterWeightAdamW(trained, lr=args.lr, steps=args.steps)
    tokens = args.seq_len * args.batch_size * ranks.dp
    losses: list[Tensor] = []  # read on logged steps only: no wait for the device in between
    logged, since = 0, time.perf_counter()
    progress = tqdm(range(1, args.steps + 1), desc="train", unit="step", mininterval=1.0, disable=not ranks.is_first)
    for step in progress:
        share, loss = objective(model, batches.next(), ranks, indexer_only=args.indexer_only)
        share.backward()
        ranks.reduce_gradients(model)
        optimizer.step()
        losses.append(ranks.mean_over_data(loss))
        if step == 1 or step % args.log_every == 0 or step == args.steps:
            value = float(losses[-1])
            now = time.perf_counter()
            speed = tokens * (step - logged) / (now - since)
            logged, since = step, now
            progress.set_postfix_str(
                f"loss={digits(value)}, {speed:,.0f} tokens/s, peak {peak_memory():.2f} GiB", refresh=False
            )
            report(step, value, speed)
    return torch.stack(losses).tolist()


def digits(loss: float) -> str:
    """A loss in fixed notation; an indexer's divergence starts at thousandths and falls."""
    return f"{loss:.4f}" if loss >= 0.01 else f"{loss:.8f}"


def peak_memory() -> float:
    """GiB: allocated on the GPU, or resident in this process on a CPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def open_tensorboard(folder: Path | None) -> SummaryWriter | None:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError('--tensorboard: needs tensorboard, pip install "mla-attention[examples]"') from error
    return SummaryWriter(str(folder))


def check_plot(path: Path | None) -> None:
    """Refuse a plot that could not be written, before the training and not after it."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot: given {str(path)!r}, allowed is a file in a folder that exists")
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ValueError('--plot: needs matplotlib, pip install "mla-attention[examples]"') from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot: given {str(path)!r}, allowed are names that end in .{', .'.join(sorted(known))}")


def draw_losses(losses: list[float], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    axes.set(xlabel="step", ylabel="training loss (nats)", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def build(args: argparse.Namespace) -> tuple[ByteLanguageModel, BatchSource, Ranks]:
    """Model, data and ranks as the options ask; sets the defaults that depend on the device in `args`.

    Raises:
        ValueError: for whatever the options ask that cannot be met, in one line.
    """
    device = resolve(args)
    config = build_config(args)
    args.lr = args.lr or 0.2 / config.hidden_size
    args.indexer_only = config.experimental_attention_variant == "dsa" and config.dsa_mode == "dense_warmup"
    check_plot(args.plot)
    text = load_text(args.data)
    ranks = start_ranks(device, tp=args.tp, cp=args.cp, sequence_parallel=args.sequence_parallel, fsdp=args.fsdp)
    batches = BatchSource(
        text,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        packed=args.packed,
        length_multiple=args.document_multiple,
        seed=args.seed + ranks.rank("dp"),
        device=device,
    )
    torch.manual_seed(args.seed)
    model = ByteLanguageModel(
        config,
        backend=args.backend,
        recompute_blocks=args.recompute == "block",
        device=device,
        dtype=getattr(torch, args.dtype),
    )
    parallelize_model(model, ranks)
    if args.indexer_only:
        model.train_only_indexers()
    return model, batches, ranks


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        model, batches, ranks = build(args)
        board = open_tensorboard(args.tensorboard if ranks.is_first else None)
    except ValueError as error:  # ConfigError is one
        parser.error(str(error))

    def say(line: str) -> None:
        if ranks.is_first:
            tqdm.write(line)

    def report(step: int, loss: float, speed: float) -> None:
        say(f"step {step} loss {digits(loss)}  {speed:,.0f} tokens/s  peak {peak_memory():.2f} GiB")
        if board is not None:
            board.add_scalar("loss", loss, step)
            board.add_scalar("tokens_per_second", speed, step)

    title = f"{args.preset}, {args.layers} layer(s), {args.mode}"
    tokens = args.seq_len * args.batch_size * ranks.dp
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    say(f"{title}: {millions:.1f}M parameters, {args.dtype}, {args.steps} steps of {tokens:,} tokens")
    say(model.blocks[0].attention.extra_repr())
    start = time.perf_counter()
    losses = train(model, batches, ranks, args=args, report=report)
    seconds = time.perf_counter() - start
    if board is not None:
        board.close()
    if args.plot is not None and ranks.is_first:
        draw_losses(losses, args.plot, title)
    tenth = max(args.steps // 10, 1)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    say(
        f"done: {args.steps} steps in {seconds:.1f} s, {args.steps * tokens / seconds:,.0f} tokens/s, "
        f"peak memory {peak_memory():.2f} GiB, mean over the first {tenth} step(s) {digits(first)}, "
        f"the last {digits(last)}"
    )
    if ranks.mesh is not None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
