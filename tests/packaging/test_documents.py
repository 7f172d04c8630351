"""The README's promises, and no path of anyone's machine in the repository."""

import re
import subprocess

import pytest
import torch

from mla_attention import MLASelfAttention, shard_sequence_for_cp
from mla_attention.checkpoint import load_hf_state_dict
from mla_attention.configs import tiny
from mla_attention.fusions import host_checks
from tests.packaging.source_files import ROOT

README = (ROOT / "README.md").read_text()
# an absolute path into somebody's own folders
MACHINE_PATH = re.compile(r"(^|[^A-Za-z0-9_.])/(home|root|tmp|opt|work|Users)/[A-Za-z0-9_.]", re.MULTILINE)


def test_the_two_commands_come_first():
    commands = re.findall(r"^pip install .*&& .*$", README, re.MULTILINE)
    assert commands[:2] == [
        "pip install -e . && python examples/train_step.py",
        'pip install -e ".[test]" && pytest',
    ]


def test_readme_is_short():
    assert len(README.splitlines()) < 150


def test_readme_usage_runs(tmp_path):
    """The first Python block runs as it stands, on a CPU."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


def test_readme_names_what_exists():
    for path in re.findall(r"`((?:examples|benchmarks|tests|mla_attention|configs|fusions)/[\w/.]*)`", README):
        assert (ROOT / path).exists(), path


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name]


def test_no_machine_paths():
    found = []
    for name in tracked_files():
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):  # a picture, or deleted in this working tree
            continue
        found += [f"{name}: {match.group().strip()}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


def provoked() -> list[str]:
    """The messages of the README's table of errors, in its order, but for the last row: memory is not run out of."""
    layer = MLASelfAttention(tiny())
    hidden = torch.randn(4, 1, layer.config.hidden_size)
    calls = [
        lambda: host_checks.check_kernel_device("fused_mla_rope_inplace", hidden, interpreted=False),
        lambda: tiny(kv_lora_ranks=32),
        lambda: shard_sequence_for_cp(torch.randn(30, 1, 8), 0, 2),
        lambda: load_hf_state_dict(layer, {"q_proj.weight": hidden}),
    ]
    messages = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        messages.append(f"{type(error.value).__name__}: {error.value}")
    return messages


def test_readme_quotes_the_errors_as_they_are():
    table = README.split("## Errors you may meet")[1].split("##")[0]
    quoted = re.findall(r"^\| `(.*?)`.* \|", table, re.MULTILINE)
    for quote, message in zip(quoted, provoked(), strict=True):
        pieces = [re.escape(piece.strip()) for piece in quote.split("...")]
        assert re.search(".*".join(pieces), message), f"{quote} is not {message}"
