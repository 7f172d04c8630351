"""examples/train_step.py under torchrun on CPU ranks (gloo): the losses are those of one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "train_step.py")
COMMON = ["--device", "cpu", "--layers", "1", "--seq-len", "64", "--batch-size", "2", "--steps", "5", "--seed", "7"]


def losses(ranks: int, *arguments: str) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, SCRIPT, *COMMON, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = re.findall(r"^step (\d+) loss (\S+) ", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in printed] == [1, 2, 3, 4, 5]  # each once: rank 0 alone prints
    return [float(loss) for _, loss in printed]


@pytest.mark.parametrize(
    ("ranks", "arguments", "data"),
    [
        (2, ["--tp", "2"], []),
        (2, ["--tp", "2", "--sequence-parallel"], ["--mode", "sparse"]),
        (2, ["--cp", "2"], ["--packed", "--document-multiple", "4", "--recompute"]),
        (4, ["--tp", "2", "--cp", "2", "--sequence-parallel", "--fsdp"], []),
    ],
    ids=["tp", "tp_sp_sparse", "cp_packed", "tp_cp_sp_fsdp"],
)
def test_losses_equal_one_process(ranks, arguments, data):
    """The same batches in the same order: only the order of sums differs."""
    assert losses(ranks, *arguments, *data) == pytest.approx(losses(1, *data), abs=2e-3)


@pytest.mark.parametrize("arguments", [[], ["--fsdp"]], ids=["dp", "fsdp"])
def test_data_parallel(arguments):
    """Two ranks with batches of their own: not one process's losses, but falling ones, FSDP or not."""
    printed = losses(2, *arguments)
    assert printed[-1] < printed[0]
    assert printed != losses(1)
