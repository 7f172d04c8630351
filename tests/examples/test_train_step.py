"""examples/train_step.py, run as a user runs it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_step.py"
SMALL = ["--device", "cpu", "--layers", "2", "--seq-len", "64", "--batch-size", "4"]


def run(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess:
    """Run the script; `prelude` is Python run before it in the same process."""
    start = f"import sys, runpy\n{prelude}\nsys.argv[0] = {str(SCRIPT)!r}\n"
    start += f"sys.path.insert(0, {str(SCRIPT.parent)!r})\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", start, *arguments] if prelude else [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def losses(*arguments: str) -> list[float]:
    """The printed losses of a run that must succeed; checks that the steps are in order and end with the last."""
    done = run(*SMALL, *arguments)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^step (\d+) loss (\S+) ", done.stdout, re.MULTILINE)
    assert len(re.findall(r"\bloss \S", done.stdout)) == len(printed)  # nothing else looks like a training loss
    steps = [int(step) for step, _ in printed]
    assert steps == sorted(set(steps))
    assert f"done: {steps[-1]} steps" in done.stdout
    return [float(loss) for _, loss in printed]


@pytest.fixture(scope="module")
def twenty_steps() -> list[float]:
    return losses("--steps", "20", "--seed", "3")


def test_loss_falls(twenty_steps):
    assert len(twenty_steps) == 11  # the first step, then every second one
    assert twenty_steps[0] == pytest.approx(5.55, abs=0.1)  # ln 256: nothing learnt yet
    assert twenty_steps[-1] < twenty_steps[0] - 0.5


def test_same_seed_same_losses(twenty_steps):
    assert losses("--steps", "20", "--seed", "3") == twenty_steps


def test_other_seed_other_losses(twenty_steps):
    assert losses("--steps", "20", "--seed", "4") != twenty_steps


@pytest.mark.parametrize("kind", ["up_proj", "block"])
def test_recompute_changes_no_loss(twenty_steps, kind):
    assert losses("--steps", "20", "--seed", "3", "--recompute", kind) == pytest.approx(twenty_steps, abs=2e-3)


def test_packed():
    packed = losses("--steps", "10", "--packed")
    assert packed[-1] < packed[0]


@pytest.mark.parametrize("mode", ["dense_warmup", "sparse"])
def test_dsa_modes(mode):
    printed = losses("--steps", "10", "--mode", mode)
    assert printed[-1] < printed[0]


def test_data(tmp_path):
    """A text of one repeated line is learnt at once."""
    (tmp_path / "text.txt").write_text("abcdefgh\n" * 100)
    assert losses("--steps", "20", "--data", str(tmp_path / "text.txt"))[-1] < 3.0


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    losses("--steps", "5", "--plot", str(tmp_path / "loss.png"))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    losses("--steps", "5", "--tensorboard", str(tmp_path / "events"))
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))


@pytest.mark.parametrize(("package", "option"), [("tensorboard", "--tensorboard"), ("matplotlib", "--plot")])
def test_absent_optional_package(package, option, tmp_path):
    done = run(*SMALL, option, str(tmp_path / "out"), prelude=f"import sys; sys.modules[{package!r}] = None")
    assert_refused(done, option, package, "mla-attention[examples]")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], ["--steps", "'0'", ">= 1"]),
        (["--steps", "many"], ["--steps", "'many'"]),
        (["--preset", "glm6"], ["--preset", "glm6", "glm5"]),
        (["--colour", "red"], ["--colour"]),
        (["--data", "no/such/file"], ["--data", "no/such/file"]),
        (["--data", os.devnull], ["--data", "0 bytes"]),
        (["--lr", "-1"], ["--lr", "-1.0"]),
        (["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["--tp", "2"], ["--tp 2", "1 process", "torchrun"]),
        (["--cp", "2", "--seq-len", "30"], ["--seq-len", "30", "4"]),
        (["--cp", "2", "--document-multiple", "6"], ["--document-multiple", "6", "2 * cp = 4"]),
        (["--packed", "--document-multiple", "7"], ["--seq-len", "256", "7"]),
        (["--sequence-parallel"], ["--sequence-parallel", "--tp 1"]),
        (["--fsdp"], ["--fsdp", "torchrun"]),
        (["--plot", "no/such/folder/loss.png"], ["--plot", "no/such/folder"]),
        (["--plot", "loss.xyz"], ["--plot", "loss.xyz", ".png"]),
        (["--lr", "inf"], ["--lr", "inf"]),
        (["--mode", "dense_warmup", "--indexer-loss-coeff", "0"], ["--indexer-loss-coeff", "dense_warmup"]),
        (["--preset", "deepseek_v3", "--mode", "sparse"], ["--mode", "sparse", "deepseek_v3"]),
        (["--indexer-loss-coeff", "1"], ["--indexer-loss-coeff", "dense"]),
        (["--mode", "sparse", "--indexer-loss-coeff", "-1"], ["dsa_indexer_loss_coeff", "-1"]),
    ],
    ids=lambda value: "_".join(value).replace("/", ".") if isinstance(value, list) and value[0][:2] == "--" else "",
)
def test_bad_arguments(arguments, named, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    main = importlib.import_module("train_step").main
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu", *arguments])
    done = subprocess.CompletedProcess(arguments, stopped.value.code, *capsys.readouterr())
    assert_refused(done, *named)


def test_fused_rope_needs_a_gpu():
    done = run(*SMALL, "--fused-rope", prelude="import os; os.environ.pop('TRITON_INTERPRET', None)")
    assert_refused(done, "--fused-rope", "CUDA")


def test_short_text(tmp_path):
    (tmp_path / "text.txt").write_text("short")
    assert_refused(run(*SMALL, "--data", str(tmp_path / "text.txt")), "--data", "5", "65")


def assert_refused(done: subprocess.CompletedProcess, *named: str) -> None:
    """One line on stderr that holds every one of `named`, nothing on stdout, exit status 2."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("train_step.py: error: ")
    for part in named:
        assert part in line, line


def test_runs_from_another_folder(tmp_path):
    """Its neighbours in examples/ are found from anywhere; a configs/ folder there is not taken for ours."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise RuntimeError('the wrong configs')\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--steps", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
