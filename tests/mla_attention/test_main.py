import subprocess
import sys

import pytest

from mla_attention.__main__ import main
from mla_attention.configs import PRESETS


def test_without_arguments_presets_are_listed() -> None:
    done = subprocess.run([sys.executable, "-m", "mla_attention"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["preset", *PRESETS]
    assert done.stderr == ""


@pytest.mark.parametrize("name", PRESETS)
def test_one_preset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--seq-len", "8192"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{name}: ")
    assert "8,192 tokens" in printed.out
    assert printed.err == ""


def test_unknown_preset_is_one_line_and_exit_status_2() -> None:
    done = subprocess.run([sys.executable, "-m", "mla_attention", "glm6"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: name must be one of {', '.join(PRESETS)}, got 'glm6'\n"


def test_bad_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--seq-len", "0"]) == 2
    assert capsys.readouterr().err == "error: seq_len must be a positive int, got 0\n"
