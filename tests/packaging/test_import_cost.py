"""`import mla_attention` adds at most 0.3 s to `import torch`, and loads no optional package."""

import subprocess
import sys

ALLOWED_SECONDS = 0.3
OPTIONAL = ["transformers", "transformer_engine", "megatron", "matplotlib", "tensorboard"]


def test_import_is_cheap(tmp_path):
    code = "import time, torch; start = time.perf_counter(); import mla_attention; print(time.perf_counter() - start)"
    best = float("inf")
    for _ in range(5):  # the best of several: a busy machine only ever adds
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        best = min(best, float(done.stdout))
        if best <= ALLOWED_SECONDS:
            return
    assert best <= ALLOWED_SECONDS


def test_optional_packages_stay_out(tmp_path):
    code = f"import sys, mla_attention, mla_attention.configs; print([n for n in {OPTIONAL} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
