"""The harness without a GPU: statistics, gates, records, tables."""

import json

import pytest
import torch


def test_medians_and_percentiles(script):
    timing = script("measure").summarise([(float(us), 7.0) for us in (5, 1, 3, 2, 4)])
    assert (timing.us, timing.low_us, timing.high_us, timing.host_us, timing.repetitions) == (3.0, 1.0, 5.0, 7.0, 5)


def test_relative_error(script):
    error = script("measure").relative_error
    expected = torch.tensor([3.0, 4.0])
    assert error(expected, expected) == 0.0
    assert error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert error(torch.ones(2), torch.zeros(2)) == float("inf")
    nan = error(torch.tensor([float("nan"), 4.0]), expected)
    assert nan != nan
    with pytest.raises(ValueError, match="shape"):
        error(torch.zeros(3), expected)


@pytest.mark.parametrize(
    ("actual", "status"), [([1.0, 2.0], None), ([1.0, 2.1], "wrong"), ([1.0, float("nan")], "wrong")]
)
def test_gate_keeps_wrong_results_from_being_timed(script, actual, status):
    measure = script("measure")
    failure, _ = measure.gate(lambda: [(torch.tensor(actual), torch.tensor([1.0, 2.0]))], 1e-3)
    assert (failure.status if failure else None) == status


def test_gate_records_an_exception(script):
    def broken():
        raise RuntimeError("no\nkernel")

    failure, error = script("measure").gate(broken, 1e-3)
    assert (failure.status, failure.message) == ("error", "RuntimeError: no kernel")
    assert error != error


def test_stopwatch_goes_on_after_a_failing_variant(script, monkeypatch):
    measure = script("measure")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "release_memory", lambda: None)
    stopwatch = measure.Stopwatch.__new__(measure.Stopwatch)
    order = []

    def once(call, lead):
        call()
        return (float(len(order)), 1.0)

    stopwatch._once = once

    def broken():
        raise RuntimeError("out of memory")

    variants = {"a": lambda: order.append("a"), "broken": broken, "b": lambda: order.append("b")}
    results = stopwatch.measure(variants, warmup=0, least=3, most=3)
    assert list(results) == ["a", "broken", "b"]
    assert isinstance(results["broken"], measure.Failure)
    assert results["a"].repetitions == results["b"].repetitions == 3
    assert order == ["a", "b", "a", "b", "a", "b", "a", "b"], "variants take turns"


def test_record_round_trip(script, record, tmp_path):
    measure = script("measure")
    run = record("rope")
    run.add("q/forward", "ours", measure.Timing(1.0, 1.0, 1.0, 1.0, 3), relative_error=float("nan"))
    run.add("q/forward", "megatron", measure.Failure("error", "CompilationError: arange"))
    path = run.write(tmp_path)
    assert path.name == f"rope_{measure.device_slug(run.environment['device'])}_{run.environment['date'][:10]}.json"
    loaded = measure.load(path)
    assert loaded["ceilings"]["copy_bytes_per_s"] == 4e12
    assert loaded["rows"][0]["status"] == "ok"
    assert loaded["rows"][0]["relative_error"] is None, "JSON has no NaN"
    assert loaded["rows"][1]["message"] == "CompilationError: arange"
    assert {"device", "torch", "triton", "git_revision", "driver", "date"} <= loaded["environment"].keys()
    run.tag = "again"
    assert run.write(tmp_path).stem.endswith("_again")


@pytest.mark.parametrize("data", [{"schema": 0}, {"schema": 1, "script": "rope"}, []])
def test_load_refuses_other_files(script, tmp_path, data):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"x\.json"):
        script("measure").load(path)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([("ours", "ok"), ("megatron", "skipped")], 0),
        ([("ours", "ok"), ("megatron", "error")], 3),
        ([("ours_gemm", "wrong"), ("megatron", "ok")], 1),
        ([("ours", "error")], 1),
    ],
)
def test_exit_status(script, record, statuses, expected):
    run = record("rope")
    run.rows = [{"row": "r", "variant": v, "status": s} for v, s in statuses]
    assert run.exit_status() == expected


def test_device_names_as_words(script):
    slug = script("measure").device_slug
    assert slug("NVIDIA H200") == "h200"
    assert slug("NVIDIA GeForce RTX 4090") == "rtx-4090"
    assert slug("cpu") == "cpu"


def test_table(script):
    measure = script("measure")
    lines = measure.render_table(["row", "us"], [["a", 1.23456], ["long name", None], ["b", 12345.6]]).splitlines()
    assert lines[2] == "a          1.23"
    assert lines[3].endswith("-")
    assert lines[4].endswith("12346")


def test_target_text(script):
    text = script("measure").target_text
    assert text({}) is None
    assert text({"meets_target": True, "checks": {"speedup": True}}) == "met"
    assert text({"meets_target": False, "checks": {"speedup": False, "packed": True}}) == "missed: speedup"


def test_the_device_waits_longer_than_the_host_needs(script):
    lead_us = script("measure").lead_us
    assert lead_us(10.0) == 300.0
    assert lead_us(800.0) == 1200.0
    assert lead_us(1e6) == 50e3
