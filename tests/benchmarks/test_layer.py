"""The layer, assembly and dsa benchmarks on a tiny model on the CPU: rows, ratios, verdicts, crossover."""

import pytest
import torch

from mla_attention.configs import tiny

DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 4,
}


@pytest.fixture
def small_layer(script, monkeypatch):
    """The layer script with tiny() behind every preset name, unfused, on the CPU."""
    layer = script("layer")
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    monkeypatch.setattr(layer, "GATE_TOKENS", 16)
    monkeypatch.setattr(layer, "step_memory", lambda *arguments: 2**20)

    def preset(name, **overrides):
        return tiny(**{**overrides, "apply_rope_fusion": False})

    monkeypatch.setattr("mla_attention.configs.get_preset", preset)
    return layer


@pytest.mark.parametrize("layout", ["sbhd", "packed", "ragged", "batch8"])
def test_a_tiny_layer_runs_through(small_layer, watch, record, layout):
    run, model = record("layer"), small_layer.Model("glm5")
    case = small_layer.Case("glm5", layout, 32)
    names = ["ours_auto", "ours_split", "transformers_sdpa"]
    small_layer.measure_case(run, watch, model, case, names, {})
    by = {(r["row"].rpartition("/")[2], r["variant"]): r for r in run.rows}
    assert not {k: r["message"] for k, r in by.items() if r["status"] not in ("ok", "skipped")}
    ours = by["step", "ours_auto"]
    assert ours["roofline_us"] == pytest.approx((ours["gemm_flop"] + ours["attention_flop"]) / 800e12 * 1e6)
    assert ours["peak_extra_bytes"] == 2**20
    assert by["forward", "transformers_sdpa"]["status"] == ("ok" if layout == "sbhd" else "skipped")
    assert "step" in small_layer.table(run.rows)


def test_an_absent_peer_costs_its_rows_only(small_layer, watch, record):
    run, model = record("layer"), small_layer.Model("glm5")
    small_layer.measure_case(
        run, watch, model, small_layer.Case("glm5", "sbhd", 16), ["ours_auto", "megatron_fused"], {}
    )
    statuses = {r["variant"]: r["status"] for r in run.rows if r["row"].endswith("/step")}
    assert statuses["ours_auto"] == "ok"
    assert statuses["megatron_fused"] in ("skipped", "error")


def test_layer_verdicts(script, record):
    layer, measure = script("layer"), script("measure")
    timing = lambda ms: measure.Timing(ms * 1e3, 0.0, 0.0, 0.0, 3)  # noqa: E731

    class Model:
        config = __import__("mla_attention.configs").configs.deepseek_v3()

    run = record("layer")
    case = layer.Case("deepseek_v3", "sbhd", 4096)
    results = {"ours_auto": timing(11.7), "megatron_fused": timing(13.08), "megatron_unfused": timing(15.5)}
    memory = {"ours_auto": int(1.4 * 2**30), "megatron_fused": int(1.53 * 2**30)}
    layer.add_rows(run, Model, case, "step", results, memory)
    ours = run.find("deepseek_v3/sbhd/4096/step", "ours_auto")
    assert ours["peer"] == "megatron_fused", "the faster of the two"
    assert ours["checks"] == {"time": True, "memory": False}
    assert ours["lower_bound_bytes"] == 1.25 * 2**30
    packed = layer.Case("deepseek_v3", "packed", 4096)
    batch = layer.Case("deepseek_v3", "batch8", 4096)
    layer.add_rows(run, Model, packed, "step", {"ours_auto": timing(12.0)}, {})
    layer.add_rows(run, Model, batch, "step", {"ours_auto": timing(10.0)}, {})
    assert run.find("deepseek_v3/batch8/4096/step", "ours_auto")["checks"] == {"packed": False}


def test_cases(script):
    layer = script("layer")
    assert layer.Case("glm5", "sbhd", 4096).lengths == [4096]
    packed = layer.Case("glm5", "packed", 4096)
    assert packed.offsets() == [512 * i for i in range(9)]
    assert packed.hidden_shape == (4096, 1)
    assert layer.Case("glm5", "batch8", 4096).hidden_shape == (512, 8)
    ragged = layer.Case("glm5", "ragged", 4096)
    assert len(set(ragged.lengths)) == len(ragged.lengths) == 8
    assert ragged.offsets()[-1] == sum(ragged.lengths) == 4096


def test_assembly_runs_through(script, watch, record, monkeypatch, device):
    assembly = script("assembly")
    monkeypatch.setattr(assembly, "DEVICE", device)
    monkeypatch.setattr(assembly.peers, "megatron_rope", lambda: (_ for _ in ()).throw(ImportError("absent")))
    run = record("assembly")
    assembly.measure_shape(run, watch, assembly.Shape("small", "tiny", 2, 4, (0.7, 0.86)))
    by = {(r["row"], r["variant"]): r for r in run.rows}
    assert by["assembly/small/forward", "megatron"]["status"] == "skipped"
    failed = {k: r["message"] for k, r in by.items() if r["status"] not in ("ok", "skipped")}
    assert not failed
    assert by["assembly/small/backward", "ours_gemm"]["peer"] == "ours_split", "stands in for an absent peer"
    assert by["assembly/small/backward", "ours_gemm"]["flop"] == 2 * by["assembly/small/forward", "ours_gemm"]["flop"]


def test_dsa_layer_rows(script, watch, record, monkeypatch, tmp_path):
    dsa = script("dsa")
    monkeypatch.setattr(dsa, "DEVICE", "cpu")
    monkeypatch.setattr(dsa, "GATE_TOKENS", 12)
    monkeypatch.setattr(dsa, "GATE_TOPK", 4)
    monkeypatch.setattr(dsa, "step_memory", lambda *arguments: 2**20)

    def preset(name, **overrides):
        base = {} if overrides.get("experimental_attention_variant", "") is None else DSA
        return tiny(**{**base, **overrides, "apply_rope_fusion": False})

    monkeypatch.setattr("mla_attention.configs.get_preset", preset)
    run = record("dsa")
    dsa.measure_layers(run, watch, "glm5", [8, 16], tmp_path, profile=False)
    failed = {
        (r["row"], r["variant"]): r["message"]
        for r in run.rows
        if r["status"] != "ok" and r["variant"] != "megatron_dsa"
    }
    assert not failed
    ours = run.find("layer/glm5/16/step", "ours_dsa")
    assert ours["time_over_dense"] == 1.0
    assert "layer/glm5/16/step" in dsa.table(run.rows)
    assert len(list(tmp_path.glob("dsa_*.json"))) == 1


def test_crossover(script):
    crossover = script("dsa").crossover
    assert crossover([(4096, 2.0, 1.0), (16384, 4.0, 16.0)]) == pytest.approx(4096 * 2 ** (2 / 3))
    assert crossover([(4096, 1.0, 2.0), (16384, 4.0, 16.0)]) == 4096
    assert crossover([(4096, 2.0, 1.0), (16384, 17.0, 16.0)]) is None
    assert crossover([]) is None


def test_kl_backward_over_scores(script, record):
    dsa, measure = script("dsa"), script("measure")
    run = record("dsa")
    timing = lambda us: measure.Timing(us, us, us, 1.0, 3)  # noqa: E731
    run.add("indexer_scores/32x128/8192x8192", "ours", timing(100.0))
    run.add("indexer_kl/32x128+64x576/8192/top2048/forward", "ours", timing(300.0))
    run.add("indexer_kl/32x128+64x576/8192/top2048/step", "ours", timing(420.0))
    dsa.compare_kl_with_scores(run)
    assert run.rows[-1]["backward_over_scores"] == pytest.approx(1.2)
    assert run.rows[-1]["meets_target"] is True


@pytest.mark.parametrize("causal", [False, True])
def test_random_selection(script, monkeypatch, causal):
    kernels = script("dsa_kernels")
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    chosen = kernels.random_selection(9, 9, 4, causal=causal)
    for row, indices in enumerate(chosen.tolist()):
        used = [i for i in indices if i >= 0]
        assert used == sorted(set(used))
        assert indices[len(used) :] == [-1] * (4 - len(used)), "unused slots trail"
        assert len(used) == (min(row + 1, 4) if causal else 4)
        assert not causal or max(used) <= row


def test_kernel_rows_are_gated_and_timed(script, watch, record):
    dsa, kernels = script("dsa"), script("dsa_kernels")
    run = record("dsa")
    good, bad = torch.ones(3), torch.full((3,), 1.1)
    calls = {"ours": lambda: good, "ours_deterministic": lambda: good, "torch_topk": lambda: good}
    case = kernels.KernelCase("x", calls, {"ours": lambda: [(good, good)]}, 1e-3, flops=10**9)
    case.targets = {"flop_per_s": 1e14}
    dsa.measure_kernel(run, watch, case)
    assert run.find("x", "ours")["checks"] == {"flop_per_s": False}
    case = kernels.KernelCase("y", calls, {"ours": lambda: [(bad, good)]}, 1e-3, flops=10**9)
    dsa.measure_kernel(run, watch, case)
    assert {r["variant"]: r["status"] for r in run.rows if r["row"] == "y"} == {
        "ours": "wrong",
        "ours_deterministic": "wrong",
        "torch_topk": "ok",
    }


def test_scores_compare_where_they_are_finite(script):
    kernels, measure = script("dsa_kernels"), script("measure")
    infinity = float("-inf")
    expected = torch.tensor([[1.0, infinity], [1.0, 2.0]])
    assert all(measure.relative_error(a, b) == 0.0 for a, b in kernels.finite_pair(expected, expected))
    leaking = torch.tensor([[1.0, 0.5], [1.0, 2.0]])
    assert max(measure.relative_error(a, b) for a, b in kernels.finite_pair(leaking, expected)) > 0.1
