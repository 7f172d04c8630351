"""examples/parity.py: what it compares, that it passes on the kernels, and that it fails when they are off."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "parity.py"
GRADIENTS = ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj", "linear_kv_down_proj", "kv_layernorm")


@pytest.fixture(scope="module")
def parity():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("parity_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # the script has to set it itself
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600, env=environment
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "tiny"],
        ["--preset", "tiny", "--packed", "--assembly", "gemm"],
        ["--preset", "glm5", "--assembly", "split"],
        ["--preset", "deepseek_v3", "--packed", "--heads", "3", "--seq-len", "16"],
    ],
    ids=" ".join,
)
def test_fused_equals_unfused(arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("all pass")
    for name in ("query", "key", "value", "output", "d hidden", *(f"d {g}.weight" for g in GRADIENTS)):
        assert any(line.startswith(f"{name} ") and line.endswith("pass") for line in done.stdout.splitlines()), name


@pytest.mark.parametrize("layout", [[], ["--packed"]], ids=["sbhd", "packed"])
def test_dsa(layout):
    done = run("--preset", "tiny", "--mode", "dsa", "--seq-len", "16", *layout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the keys that fp64 selects are selected" in done.stdout
    for name in ("indexer loss", "d core_attention.indexer.linear_wq_b.weight"):
        assert any(line.startswith(f"{name} ") for line in done.stdout.splitlines()), name


def test_a_wrong_rotation_fails(parity, monkeypatch, capsys):
    from mla_attention import fusions
    from mla_attention.fusions import reference

    def swapped(t, cos, sin, *arguments, **keywords):
        return reference.fused_mla_rope_out_of_place(t, cos, -sin, *arguments, **keywords)

    monkeypatch.setattr(fusions, "fused_apply_mla_rope_for_q", swapped, raising=False)
    assert parity.main(["--preset", "tiny", "--seq-len", "16", "--dtype", "fp32"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("query ")).endswith("FAIL")
    assert next(line for line in lines if line.startswith("value ")).endswith("pass")
    assert "tensors fail" in lines[-1]


def test_arguments_that_do_not_fit(parity, capsys):
    assert parity.main(["--preset", "deepseek_v2_lite", "--mode", "dsa"]) == 2
    assert "q_lora_rank" in capsys.readouterr().err
    refused = [["--seq-len", "7"], ["--heads", "0"], ["--plot", "no/such/folder/parity.png"]]
    if not torch.cuda.is_available():
        refused.append(["--dtype", "bf16"])
    for arguments in refused:
        with pytest.raises(SystemExit) as stop:
            parity.main(arguments)
        assert stop.value.code == 2
        assert f"{arguments[0]}: given " in capsys.readouterr().err.splitlines()[-1]


def test_plot(parity, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install mla-attention[bench]")
    comparison = parity.compare("query", torch.ones(3), torch.ones(3), torch.ones(3, dtype=torch.float64))
    parity.plot([comparison, comparison], "title", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_distance(parity, dtype):
    one = torch.ones(1, dtype=dtype)
    above = one * (1 + torch.finfo(dtype).eps)
    tiny = torch.finfo(dtype).tiny
    assert parity.ulp_distance(one, one) == 0
    assert parity.ulp_distance(one, above) == 1
    assert parity.ulp_distance(-one, -above) == 1
    assert parity.ulp_distance(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)) == 0
    across = parity.ulp_distance(torch.tensor([tiny], dtype=dtype), torch.tensor([-tiny], dtype=dtype))
    assert across == 2 * parity.ulp_distance(torch.tensor([tiny], dtype=dtype), torch.tensor([0.0], dtype=dtype))


def test_comparison_has_two_conditions(parity):
    exact = torch.linspace(1, 2, 64, dtype=torch.float64)
    unfused = exact.float()
    assert parity.compare("x", unfused.clone(), unfused, exact).passed
    assert not parity.compare("x", unfused + 1e-3, unfused, exact).passed, "too far from unfused"
    near = parity.compare("x", unfused * (1 + 2**-20), unfused, exact)
    assert near.relative < 1e-5
    assert not near.passed, "further from fp64 than unfused is"


def test_a_tensor_that_is_zero_in_fp64_is_held_to_be_small(parity):
    zero = torch.zeros(64, dtype=torch.float64)
    assert parity.compare("x", torch.full((64,), 1e-7), torch.zeros(64), zero).passed
    assert not parity.compare("x", torch.full((64,), 1e-3), torch.zeros(64), zero).passed


@pytest.mark.parametrize("tokens", [8, 32, 512])
def test_packed_lengths(parity, tokens):
    lengths = parity.packed_lengths(tokens)
    assert sum(lengths) == tokens
    assert 0 in lengths
    assert min(lengths) >= 0


def test_selection_overlap(parity):
    a = torch.tensor([[[0, 1, -1], [2, 3, 4]]])
    b = torch.tensor([[[0, 1, -1], [2, 3, 5]]])
    assert parity.selection_overlap(a, a) == 1.0
    assert parity.selection_overlap(a, b) == pytest.approx(4 / 5)
