"""A wheel of this checkout, built and unpacked once."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.source_files import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build/ folder left in the checkout would put deleted files into the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in ("mla_attention", "configs", "fusions"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(target)]
    subprocess.run([sys.executable, *command], cwd=source, check=True)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds what the wheel installs, for PYTHONPATH (it comes before any editable install)."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site
