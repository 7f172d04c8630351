"""The rope benchmark: necessary bytes, verdicts, and one tiny shape through its whole path on the CPU."""

import itertools
from dataclasses import replace

import pytest
import torch


def shape(script, name):
    return next(s for s in script("rope").SHAPES if s.name == name)


@pytest.mark.parametrize(
    ("name", "microseconds", "terabytes"),
    [
        ("glm5_q", 77.7, 3.45),
        ("glm5_q_tp8", 43.3, 3.10),
        ("dsv3_q", 150.3, 3.57),
        ("indexer_q", 144.7, 3.71),
        ("indexer_k", 11.3, 1.49),
        ("glm5_q_tp8_4096", 6.6, 1.27),
        ("glm5_kv", 508.3, 4.0),
        ("glm5_kv_tp8", 253.9, 4.0),
        ("dsv3_kv", 607.4, 4.0),
    ],
)
def test_necessary_bytes_give_the_published_rates(script, name, microseconds, terabytes):
    assert shape(script, name).necessary_bytes / microseconds / 1e6 == pytest.approx(terabytes, abs=0.06)


def test_necessary_bytes_are_those_of_the_tensors(script, monkeypatch):
    rope = script("rope")
    monkeypatch.setattr(rope, "DEVICE", "cpu")
    small = rope.Shape("x", tokens=6, heads=3, nope=24, emb=16, value=20)
    inputs = rope.Inputs(small)
    tensors = (inputs.x, inputs.k_pe, *inputs.grads)  # the output gradients have the outputs' shapes
    assert small.necessary_bytes == sum(t.numel() * t.element_size() for t in tensors)
    rotary = rope.Inputs(replace(small, value=0))
    assert replace(small, value=0).necessary_bytes == 2 * rotary.x[..., 24:].numel() * 2


def test_packed_offsets(script):
    offsets = script("rope").packed_offsets(1000, 64)
    assert len(offsets) == 65
    assert (offsets[0], offsets[-1]) == (0, 1000)
    assert all(a < b for a, b in itertools.pairwise(offsets))


@pytest.mark.parametrize("changes", [{}, {"sequences": 3}, {"value": 20}, {"value": 20, "sequences": 3}])
def test_a_tiny_shape_runs_through(script, watch, record, monkeypatch, device, changes):
    rope = script("rope")
    monkeypatch.setattr(rope, "DEVICE", device)
    run = record("rope")
    small = rope.Shape("tiny", tokens=5, heads=3, nope=24, emb=16, **changes)
    rope.measure_shape(run, watch, small, {"eager", "megatron"}, rope.Failure("skipped", "absent"))
    by = {(r["row"], r["variant"]): r for r in run.rows}
    failed = {key: r["message"] for key, r in by.items() if r["status"] not in ("ok", "skipped")}
    assert not failed
    assert by["tiny/forward", "megatron"]["status"] == "skipped"
    assert by["tiny/forward", "ours"]["copy_share"] == pytest.approx(small.necessary_bytes / 1e-4 / 4e12)
    raw = set() if small.value else {"ours", "ours_autograd", "ours_engine", "eager_autograd"}
    kv = {"ours", "eager"} if small.value else set()
    assert {v for row, v in by if row == "tiny/backward"} == raw | kv | {"megatron"}
    assert "tiny/backward" in rope.table(run.rows)


def test_a_wrong_kernel_is_not_timed(script, watch, record, monkeypatch, device):
    rope = script("rope")
    monkeypatch.setattr(rope, "DEVICE", device)
    honest = rope.own_forward

    def off_by_a_little(inputs, module, *, in_place):
        forward = honest(inputs, module, in_place=in_place)
        return (lambda t: (forward(t)[0] * 1.01,)) if in_place else forward

    monkeypatch.setattr(rope, "own_forward", off_by_a_little)
    run = record("rope")
    rope.measure_shape(run, watch, rope.Shape("tiny", 4, 2, 8, 16), set(), None)
    (forward,) = [r for r in run.rows if r["row"] == "tiny/forward"]
    assert forward["status"] == "wrong"
    assert "us" not in forward
    assert run.exit_status() == 1


def test_verdicts(script, record):
    rope, measure = script("rope"), script("measure")
    run = record("rope")
    timing = lambda us: measure.Timing(us, us, us, 1.0, 3)  # noqa: E731
    base, packed = (shape(script, n) for n in ("glm5_q", "glm5_q_packed"))
    rope.add_rows(run, base, "forward", {"ours": timing(80.0), "megatron": timing(134.0)}, {})
    rope.add_rows(run, packed, "forward", {"ours": timing(95.0), "megatron": timing(190.0)}, {})
    first, second = run.find("glm5_q/forward", "ours"), run.find("glm5_q_packed/forward", "ours")
    assert first["speedup"] == pytest.approx(1.675)
    assert first["checks"] == {"speedup": False, "copy_share": True}
    assert second["checks"]["packed"] is False
    assert "missed: speedup" in rope.table(run.rows)


def test_without_a_peer_the_ratio_stays_open(script, record):
    rope, measure = script("rope"), script("measure")
    run = record("rope")
    small = shape(script, "glm5_q_tp8")
    skipped = measure.Failure("skipped", "megatron-core is not importable")
    rope.add_rows(run, small, "forward", {"ours": measure.Timing(40.0, 40.0, 40.0, 1.0, 3), "megatron": skipped}, {})
    assert run.find("glm5_q_tp8/forward", "ours")["meets_target"] is None
    assert run.exit_status() == 0


def test_list_needs_no_device(script, capsys):
    assert script("rope").main(["--list"]) == 0
    assert "indexer_k" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("name", ["rope", "layer", "dsa", "assembly", "startup"])
def test_without_a_device_scripts_say_so(script, capsys, name):
    with pytest.raises(SystemExit) as stop:
        script(name).main([])
    assert stop.value.code == 2
    assert "CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_startup_step(script, monkeypatch, device, tokens, packed):
    startup = script("startup")
    monkeypatch.setattr(startup, "DEVICE", device)
    startup._step(tokens, packed)


def test_startup_counts_tokens_that_specialise(script):
    counts = script("startup").TOKEN_COUNTS
    assert len(counts) == len(set(counts)) == 30
    assert 1 in counts, "triton specialises on 1"
    assert {n % 16 == 0 for n in counts} == {True, False}, "and on multiples of 16"


def test_startup_rows(script, record, monkeypatch):
    startup = script("startup")
    values = {
        "first_call": {"first_call_s": 1.4, "kernels": 2.0},
        "compiles": {"kernels": 8.0, "recompilations": 1.0},
        "import": {"import_s": 0.05},
    }
    monkeypatch.setattr(startup, "run_probe", values.__getitem__)
    run = record("startup")
    startup.add_rows(run)
    met = {r["row"]: r["meets_target"] for r in run.rows}
    assert met == {"startup/first_call": True, "startup/compiles": False, "startup/import": True}
    assert "recompilations 1" in startup.table(run.rows)


def test_a_probe_that_fails_says_why(script, monkeypatch):
    startup = script("startup")
    with pytest.raises(RuntimeError, match="error"):
        startup.run_probe("no_such_probe")
