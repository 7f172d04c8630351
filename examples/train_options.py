"""The command line of train_step.py: options, defaults by device, and the layer config they describe."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import NoReturn

import torch

from mla_attention.configs import PRESETS, MLAConfig, get_preset

# The tiny model trains in under a minute on a CPU; a full-size layer fills a GPU, and on a CPU shows that it runs.
TINY_DEFAULTS = {"layers": 3, "seq_len": 256, "batch_size": 8, "steps": 150}
FULL_SIZE_ON_GPU = {"layers": 1, "seq_len": 4096, "batch_size": 1, "steps": 100}
FULL_SIZE_ON_CPU = {"layers": 1, "seq_len": 128, "batch_size": 1, "steps": 5}


class OneLineParser(argparse.ArgumentParser):
    """Refuses bad arguments with one line and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="train_step.py",
        description="Train a byte-level language model of MLA layers on real text.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Without arguments: a tiny model on a CPU, one full-size GLM-5 layer in bf16 on a GPU.\n"
        "Ranks: torchrun --nproc-per-node 4 examples/train_step.py --tp 2 --cp 2 --sequence-parallel --fsdp",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=sorted(PRESETS), help="layer dimensions (CPU: tiny, GPU: glm5)")
    model.add_argument("--layers", type=_positive, help="attention layers (tiny: 3, else 1)")
    model.add_argument("--mode", choices=["dense", "dense_warmup", "sparse"], help="attention (default: as the preset)")
    model.add_argument("--indexer-loss-coeff", type=float, help="weight of the indexer's loss (default: 1)")
    model.add_argument("--backend", choices=["torch", "te"], default="torch", help="linear, norm and attention modules")
    model.add_argument(
        "--fused-rope", action=argparse.BooleanOptionalAction, help="Triton RoPE kernels (default: on a GPU)"
    )
    model.add_argument("--dtype", choices=["float32", "bfloat16"], help="parameters (CPU: float32, GPU: bfloat16)")

    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, metavar="FILE", help="text to learn (default: Python's standard library)")
    data.add_argument("--seq-len", type=_positive, help="tokens of a sequence (tiny: 256, GPU: 4096, CPU: 128)")
    data.add_argument("--batch-size", type=_positive, help="sequences of a batch (tiny: 8, else 1)")
    data.add_argument("--packed", action="store_true", help="pack documents of uneven length into one row")
    data.add_argument("--document-multiple", type=_positive, help="of packed lengths (default: 2 * cp, or 1)")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=_positive, help="training steps (tiny: 150, GPU: 100, CPU: 5)")
    training.add_argument("--lr", type=float, help="peak learning rate (default: 0.2 / hidden size)")
    training.add_argument(
        "--seed", type=int, default=0, help="of weights and data; the same seed gives the same losses"
    )
    training.add_argument(
        "--recompute",
        nargs="?",
        const="up_proj",
        choices=["up_proj", "block"],
        help="recompute in backward: the up projections (default) or whole blocks",
    )
    training.add_argument("--device", default=None, help="cpu or cuda (default: cuda where there is one)")

    ranks = parser.add_argument_group("ranks (under torchrun)")
    ranks.add_argument("--tp", type=_positive, default=1, help="tensor-parallel ranks")
    ranks.add_argument("--cp", type=_positive, default=1, help="context-parallel ranks")
    ranks.add_argument("--sequence-parallel", action="store_true", help="split the sequence over the tp ranks too")
    ranks.add_argument("--fsdp", action="store_true", help="shard parameters over the remaining ranks")

    output = parser.add_argument_group("output")
    output.add_argument("--log-every", type=_positive, help="steps between printed lines (default: a tenth of all)")
    output.add_argument("--plot", type=Path, metavar="PNG", help="draw the loss curve (needs matplotlib)")
    output.add_argument("--tensorboard", type=Path, metavar="DIR", help="write events (needs tensorboard)")
    return parser


def resolve(args: argparse.Namespace) -> torch.device:
    """Fill in the defaults that depend on the device, and refuse what cannot work.

    Raises:
        ValueError: naming the option, what was given and what is allowed.
    """
    device = _device(args.device)
    on_gpu = device.type == "cuda"
    args.preset = args.preset or ("glm5" if on_gpu else "tiny")
    sizes = TINY_DEFAULTS if args.preset == "tiny" else FULL_SIZE_ON_GPU if on_gpu else FULL_SIZE_ON_CPU
    for name, value in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.fused_rope = on_gpu if args.fused_rope is None else args.fused_rope
    args.log_every = args.log_every or max(args.steps // 10, 1)
    if args.fused_rope and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--fused-rope: given on a CPU, allowed on a CUDA device (or with TRITON_INTERPRET=1)")
    if args.lr is not None and not 0 < args.lr < math.inf:
        raise ValueError(f"--lr: given {args.lr}, allowed are finite numbers > 0")
    chunks = 2 * args.cp if args.cp > 1 else 1
    args.document_multiple = args.document_multiple or chunks
    if args.document_multiple % chunks != 0:
        raise ValueError(
            f"--document-multiple: given {args.document_multiple}, allowed are multiples of 2 * cp = {chunks}"
        )
    shards = math.lcm(chunks, args.cp * (args.tp if args.sequence_parallel else 1), args.document_multiple)
    if args.seq_len % shards != 0:
        raise ValueError(f"--seq-len: given {args.seq_len}, allowed are multiples of {shards} with these options")
    return device


def build_config(args: argparse.Namespace) -> MLAConfig:
    """The preset's layer with the options applied; sets `args.mode` to the preset's where not given.

    Raises:
        ConfigError, ValueError: naming the field or option, what was given and what is allowed.
    """
    preset = get_preset(args.preset)
    overrides: dict[str, object] = {
        "num_layers": args.layers,
        "init_method_std": 0.4 * preset.hidden_size**-0.5,  # the same first loss at any width, close to ln 256
        "apply_rope_fusion": args.fused_rope,
        "recompute_up_proj": args.recompute == "up_proj",
    }
    args.mode = args.mode or ("dense" if preset.experimental_attention_variant is None else "sparse")
    if args.mode == "dense":
        if args.indexer_loss_coeff is not None:
            raise ValueError(
                "--indexer-loss-coeff: given with dense attention, allowed with --mode dense_warmup|sparse"
            )
        return get_preset(args.preset, experimental_attention_variant=None, **overrides)
    if args.mode == "dense_warmup" and args.indexer_loss_coeff == 0:
        raise ValueError("--indexer-loss-coeff: given 0 with --mode dense_warmup, which trains by that loss alone")
    if args.preset == "tiny":
        overrides |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": 4,
            "dsa_indexer_head_dim": 64,
            "dsa_indexer_topk": max(args.seq_len // 4, 1),
        }
    elif preset.experimental_attention_variant is None:
        raise ValueError(f"--mode: given {args.mode} for {args.preset}, which has no indexer; allowed is dense")
    return get_preset(
        args.preset,
        dsa_mode=args.mode,
        dsa_indexer_loss_coeff=1.0 if args.indexer_loss_coeff is None else args.indexer_loss_coeff,
        dsa_indexer_use_sparse_loss=args.mode == "sparse",
        **overrides,
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed are integers >= 1")
    return value


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device: given {name!r}, allowed are 'cpu' and 'cuda'")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device: given 'cuda', but no GPU is visible; allowed is 'cpu'")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
