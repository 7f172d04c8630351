import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mla_attention.configs import PRESETS

SCRIPT = Path(__file__).parents[2] / "examples" / "inspect_layer.py"
GLM = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
}


@pytest.fixture(scope="module")
def inspect_layer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inspect_layer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_runs_by_itself() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("glm5: dsa attention, hidden 6144, 64 heads")
    assert "4,096 tokens" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", PRESETS)
def test_presets(inspect_layer: ModuleType, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_layer.main(["--preset", name, "--seq-len", "512"]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")


def test_overrides_change_the_layer(inspect_layer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "deepseek_v3", "rope_type=rope", "q_lora_rank=None", "num_attention_heads=16"]
    assert inspect_layer.main([*arguments, "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert "16 heads, no query compression" in printed
    assert "type: rope" in printed
    assert "32-bit elements" in printed


def test_device_decides_the_back_ends(inspect_layer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_layer.main(["--preset", "tiny", "--device", "cpu"]) == 0
    assert "auto: split on cpu" in capsys.readouterr().out


def test_hugging_face_config(inspect_layer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM))
    assert inspect_layer.main(["--hf-config", str(path), "--layer", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("config.json: dsa attention, hidden 6144")
    assert "base: 8e+06" in printed
    assert "top-k indices of an earlier layer" in printed
    assert "indexer.linear_wk" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "glm6"], "name must be one of tiny,"),
        (
            ["--preset", "tiny", "v_head_dims=3"],
            "tiny has no field 'v_head_dims' (given 3); the closest",
        ),
        (["--preset", "tiny", "v_head_dim=x"], "v_head_dim must be a positive int, got 'x'"),
        (["--preset", "tiny", "v_head_dim"], "override must be FIELD=VALUE, got 'v_head_dim'"),
        (["--preset", "tiny", "--seq-len", "-4"], "seq_len must be a positive int, got -4"),
        (["--preset", "tiny", "--layer", "3"], "--layer must come with --hf-config, got 3 with preset 'tiny'"),
        (["--hf-config", "missing.json"], "[Errno 2] No such file or directory: 'missing.json'"),
        (["--hf-config", str(SCRIPT)], f"--hf-config must be a JSON file, got {SCRIPT}: "),
    ],
)
def test_bad_input_is_one_line(
    inspect_layer: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_layer.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1
