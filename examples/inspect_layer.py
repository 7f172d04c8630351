"""What one attention layer costs: parameters, FLOPs and memory per token, cache, rope settings, chosen back ends.

    python examples/inspect_layer.py                                        # one GLM-5 layer at 4096 tokens
    python examples/inspect_layer.py --preset deepseek_v3 --seq-len 32768 apply_rope_fusion=True
    python examples/inspect_layer.py --hf-config config.json --layer 3 experimental_attention_variant=None

Nothing is allocated: the figures are counted from the config.
"""

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mla_attention.configs import PRESETS, MLAConfig, from_hf_config, get_preset
from mla_attention.report import layer_report
from mla_attention.report_text import report_text

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of one layer; exit status 2 after one line on stderr where the input is no layer."""
    options = parse(arguments)
    try:
        config = read_config(options)
        report = layer_report(
            config,
            seq_len=options.seq_len,
            element_bytes=ELEMENT_BYTES[options.dtype],
            device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report_text(options.preset if options.hf_config is None else options.hf_config.name, report))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", default="glm5", help=f"one of {', '.join(PRESETS)} (default %(default)s)")
    source.add_argument("--hf-config", type=Path, metavar="FILE", help="config.json of a Hugging Face model")
    parser.add_argument("--layer", type=int, help="0-based layer of --hf-config, for models that share indexers")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of one sequence (default %(default)s)")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_BYTES), default="bf16", help="of activations and cache")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="that back ends are chosen for")
    parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="fields of MLAConfig to change")
    return parser.parse_args(arguments)


def read_config(options: argparse.Namespace) -> MLAConfig:
    """The config that the options describe, overrides applied.

    Raises:
        ValueError: in one line, what is wrong with an option or the config.
        OSError: the config file cannot be read.
    """
    overrides = dict(parse_override(text) for text in options.overrides)
    if options.hf_config is None:
        if options.layer is not None:
            raise ValueError(f"--layer must come with --hf-config, got {options.layer} with preset {options.preset!r}")
        return get_preset(options.preset, **overrides)
    try:
        source = json.loads(options.hf_config.read_text())
    except ValueError as error:
        raise ValueError(f"--hf-config must be a JSON file, got {options.hf_config}: {error}") from error
    return from_hf_config(source, layer_idx=options.layer, **overrides)


def parse_override(text: str) -> tuple[str, object]:
    """`"v_head_dim=64"` -> `("v_head_dim", 64)`; what is no Python literal stays a string (`rope_type=rope`)."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"override must be FIELD=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
