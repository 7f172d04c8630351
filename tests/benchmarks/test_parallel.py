"""The two-GPU benchmark on two gloo ranks: every layout is right, its bytes are those that the layout needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_two_ranks_run_through(tmp_path: Path) -> None:
    arguments = ["--cpu", "--models", "tiny", "--lengths", "64", "--long", "128", "--repetitions", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmarks/parallel.py"]
    done = subprocess.run(
        [*command, *arguments, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("parallel_cpu_*.json")
    rows = {(r["row"], r["variant"]): r for r in json.loads(path.read_text())["rows"]}
    assert set(rows) == {
        *(("tiny/64", f"ours_{layout}") for layout in ("one", "tp", "tp_sp", "cp", "fsdp")),
        *(("tiny/128", f"ours_{layout}") for layout in ("one", "cp")),
    }
    assert {r["status"] for r in rows.values()} == {"ok"}
    assert rows["tiny/64", "ours_fsdp"]["tokens"] == 128
    for row in ("tiny/64", "tiny/128"):
        context = rows[row, "ours_cp"]
        assert context["forward_bytes_over_least"] == pytest.approx(1.0)
        assert context["backward_bytes_per_token"] == pytest.approx(context["forward_bytes_per_token"])
        assert context["error"] < 1e-5
        assert context["checks"]["bytes"]
    assert rows["tiny/64", "ours_tp_sp"]["forward_bytes_over_least"] == pytest.approx(1.0)


def test_it_says_how_it_is_started(script, monkeypatch, capsys) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert script("parallel").main([]) == 2
    assert "torchrun" in capsys.readouterr().out
