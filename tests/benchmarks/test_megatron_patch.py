"""What the benchmark of `patch()` records: wrong rows untimed, ratios to both of Megatron's, functions put back."""

import sys

import pytest
import torch

from mla_attention.configs import tiny


class Layer(torch.nn.Module):
    """Stands for a built layer of the benchmark."""

    def __init__(self, factor):
        super().__init__()
        self.config = tiny()
        self.linear_kv_down_proj = torch.nn.Linear(self.config.hidden_size, self.config.hidden_size, bias=False)
        self.factor = factor

    def forward(self, hidden):
        return self.linear_kv_down_proj(hidden.float()) * self.factor, None


@pytest.fixture
def bench(script, monkeypatch):
    module = script("megatron_patch")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


def test_rows_of_a_model(bench, script, record, watch, monkeypatch):
    measure = script("measure")
    puts = []

    class Exchange:
        def put(self, ours):
            puts.append(ours)

    def build(name, exchange):
        torch.manual_seed(0)
        right = Layer(1.0)
        wrong = Layer(1.1)
        wrong.load_state_dict(right.state_dict())
        return {
            "megatron_unfused": bench.Variant(right, exchange, False),
            "megatron_fused": measure.Failure("error", "CompilationError: arange"),
            "patched_fused": bench.Variant(right, exchange, True),
            "ours_te": bench.Variant(wrong, exchange, False),
            "ours_torch": bench.Variant(right, exchange, False),
        }

    monkeypatch.setattr(bench, "build_variants", build)
    kept = record("megatron_patch")
    bench.measure_model(kept, watch, "glm5", [8, 16], Exchange())
    assert len(kept.rows) == 2 * 2 * len(bench.VARIANTS)
    row = kept.find("glm5/sbhd/16/step", "patched_fused")
    assert row["status"] == "ok"
    assert row["time_over_megatron_unfused"] == 1.0
    assert "time_over_megatron_fused" not in row
    assert kept.find("glm5/sbhd/8/step", "megatron_fused")["status"] == "error"
    assert kept.find("glm5/sbhd/8/forward", "ours_te")["status"] == "wrong"
    assert "us" not in kept.find("glm5/sbhd/8/forward", "ours_te")
    assert True in puts
    assert puts[-1] is False
    assert "patched_fused" in bench.table(kept.rows)
    assert kept.exit_status() == 1


def test_the_exchange_puts_functions_in_and_back(bench):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    exchange = bench.Exchange()
    attention = "megatron.core.transformer.multi_latent_attention"
    theirs = sys.modules[attention].fused_apply_mla_rope_for_q
    exchange.put(True)
    assert sys.modules[attention].fused_apply_mla_rope_for_q.__module__.startswith("mla_attention")
    exchange.put(False)
    assert sys.modules[attention].fused_apply_mla_rope_for_q is theirs
