"""`python -m mla_attention` lists the presets; `python -m mla_attention NAME` prints what one layer of it costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from mla_attention.configs import get_preset
from mla_attention.report import layer_report
from mla_attention.report_text import preset_table, report_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line, without the program's name; None: those of this process.

    Returns:
        Exit status: 0, or 2 after one line on stderr where the preset or the length is not known.
    """
    parser = argparse.ArgumentParser(prog="python -m mla_attention", description=__doc__)
    parser.add_argument("preset", nargs="?", help="a preset's name; without it all presets are listed")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of one sequence (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.preset is None:
        print(preset_table())
        return 0
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        report = layer_report(get_preset(options.preset), seq_len=options.seq_len, device=device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report_text(options.preset, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
