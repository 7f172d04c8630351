"""What an install puts on a machine: one import root, whole, beside any configs/ and fusions/ of the user's own."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.packaging.source_files import ROOT

INSTALLED_AS = {
    "mla_attention": "mla_attention",
    "configs": "mla_attention/configs",
    "fusions": "mla_attention/fusions",
}


def run_python(code: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_import_root(wheel):
    with zipfile.ZipFile(wheel) as archive:
        roots = {name.split("/")[0] for name in archive.namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"mla_attention"}


def test_every_file_is_in_the_wheel(wheel):
    """The packages are listed by hand in pyproject.toml: a new folder that is not listed would be left out silently."""
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    written = {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in INSTALLED_AS.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    assert shipped == written | {"mla_attention/py.typed"}


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    required = {
        line.split(": ")[1].split(">")[0] for line in lines if line.startswith("Requires-Dist") and "extra" not in line
    }
    assert required == {"torch", "triton", "einops", "numpy", "safetensors", "tqdm"}
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")}
    assert extras == {"te", "test", "bench", "examples", "dev"}
    assert "License-Expression: Apache-2.0" in lines


def test_works_beside_folders_of_the_same_name(installed, tmp_path):
    """A user's own configs/ and fusions/ stay theirs, and ours stay ours."""
    for name in ("configs", "fusions"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'user'\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import configs, fusions\n"
        "import mla_attention, mla_attention.configs, mla_attention.fusions, mla_attention.fusions.reference\n"
        "from mla_attention import MLASelfAttention\n"
        "print(configs.OWNER, fusions.OWNER, mla_attention.configs.tiny().num_attention_heads)\n"
        "for module in (mla_attention, mla_attention.configs, mla_attention.fusions): print(module.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    owners, *files = done.stdout.splitlines()
    assert owners.startswith("user user ")
    assert files == [str(installed / name / "__init__.py") for name in INSTALLED_AS.values()]


def test_no_plain_configs_or_fusions(installed, tmp_path):
    """Neither the wheel nor the install that these tests run on makes our folders importable by their plain names."""
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('configs', 'fusions')])"
    assert run_python(code, tmp_path) == "[None, None]"
    assert run_python(code, tmp_path, PYTHONPATH=str(installed)) == "[None, None]"


def test_typed(installed):
    assert (installed / "mla_attention" / "py.typed").is_file()
