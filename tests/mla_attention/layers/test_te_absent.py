"""Transformer Engine absent, empty, broken or without a GPU: one line each, and everything else works."""

import importlib.abc
import importlib.util
import subprocess
import sys

import pytest
import torch

from mla_attention import MLASelfAttention
from mla_attention.configs import tiny
from mla_attention.layers.te_import import te_obstacle
from tests.mla_attention.layers import fake_transformer_engine as fake

# What importing transformer_engine.pytorch has been seen to raise.
BROKEN = {
    "absent": ModuleNotFoundError("No module named 'transformer_engine'"),
    "meta package": RuntimeError(
        "Found empty `transformer-engine` meta package installed. Install it\nwith extensions"
    ),
    "no cuDNN": RuntimeError("cudnn shared object not found."),
    "no torch extension": FileNotFoundError("Could not find shared object file for Transformer Engine torch lib."),
    "versions differ": AssertionError("Transformer Engine package version mismatch. Found 2.20.2 and 2.19.0"),
    "bad symbol": OSError("/usr/lib/libtransformer_engine.so: undefined symbol: cublasLtFoo"),
}


class _Raises(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds transformer_engine and raises when it is executed."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name != "transformer_engine":
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise self.error


@pytest.fixture
def without_te(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine" or name == fake.OURS]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("case", BROKEN)
def test_a_layer_on_it_is_refused_in_one_line(monkeypatch, without_te, case, gpu):
    monkeypatch.setattr(sys, "meta_path", [_Raises(BROKEN[case]), *sys.meta_path])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for _ in range(2):  # what a failed import leaves behind must not change the second answer
        with pytest.raises(ValueError, match="backend: given 'te'") as raised:
            MLASelfAttention(tiny(), backend="te")
        message = str(raised.value)
        assert "\n" not in message
        assert type(BROKEN[case]).__name__ in message
        assert 'pip install --no-build-isolation "mla-attention[te]"' in message
    core = MLASelfAttention(tiny(core_attention_backend="te"))  # may be built: a checkpoint may be prepared anywhere
    with pytest.raises(ValueError, match=r"given 'te' for qk dim 40, v dim 20, sbhd on cpu; .*cannot be imported"):
        core(torch.randn(4, 1, core.config.hidden_size))
    works = MLASelfAttention(tiny())
    works(torch.randn(4, 1, works.config.hidden_size))[0].sum().backward()


def test_installed_on_a_machine_without_a_gpu(monkeypatch):
    fake.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"Transformer Engine 2\.20\.2 is installed, but there is no CUDA GPU"
    ) as raised:
        MLASelfAttention(tiny(), backend="te")
    assert "\n" not in str(raised.value)


def test_it_is_imported_only_when_asked_for():
    script = (
        "import sys, torch, mla_attention, mla_attention.checkpoint, mla_attention.core_attention\n"
        "from mla_attention.configs import tiny\n"
        "mla_attention.MLASelfAttention(tiny())(torch.randn(4, 1, 64))\n"
        "assert not any(name.startswith('transformer_engine') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_an_unknown_back_end_names_the_known_ones():
    with pytest.raises(ValueError, match="backend: given 'TE', allowed are 'torch', 'te'"):
        MLASelfAttention(tiny(), backend="TE")


def test_nothing_is_in_the_way_of_a_complete_installation(monkeypatch):
    fake.install(monkeypatch)
    assert te_obstacle() is None
