"""From JSON to the README's table and the picture."""

import json

import pytest

pytest.importorskip("matplotlib", reason="pip install mla-attention[bench]")


@pytest.fixture
def results(script, record, tmp_path):
    """A folder with a rope, a layer and a dsa record, made up."""
    measure = script("measure")
    timing = lambda us: measure.Timing(us, us, us, 1.0, 3)  # noqa: E731
    rope, layer, dsa = (record(name) for name in ("rope", "layer", "dsa"))
    for run in (rope, layer, dsa):
        run.environment |= {"device": "NVIDIA H200", "date": "2026-11-30T08:00:00+00:00", "megatron_core": "0.19.2"}
    for direction, ours, peer in (("forward", 78.0, 134.0), ("backward", 79.0, 163.0)):
        rope.add(f"glm5_q/{direction}", "ours", timing(ours))
        rope.add(f"glm5_q/{direction}", "megatron", timing(peer))
    row = "deepseek_v3/sbhd/4096/step"
    layer.add(row, "ours_auto", timing(11700.0), peak_extra_bytes=int(1.3 * 2**30))
    layer.add(row, "megatron_fused", timing(13080.0), peak_extra_bytes=int(1.53 * 2**30))
    layer.add(row, "megatron_unfused", timing(15490.0))
    for tokens, sparse, dense in ((4096, 20e3, 13e3), (65536, 500e3, 1200e3)):
        dsa.add(f"layer/glm5/{tokens}/step", "ours_dsa", timing(sparse))
        dsa.add(f"layer/glm5/{tokens}/step", "ours_dense", timing(dense))
    for run in (rope, layer, dsa):
        run.write(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"schema": 99}))
    return tmp_path


def test_table_goes_between_the_markers(script, results, capsys):
    plot = script("plot")
    readme = results / "README.md"
    readme.write_text(f"# x\n\n{plot.BEGIN}\nstale row\n{plot.END}\n\n## y\n")
    for _ in range(2):
        assert plot.main(["--results", str(results), "--readme", str(readme)]) == 0
        text = readme.read_text()
        assert text.startswith(f"# x\n\n{plot.BEGIN}\n")
        assert text.endswith(f"{plot.END}\n\n## y\n")
        assert "stale row" not in text
    assert "| RoPE, GLM-5 query, 16k tokens, forward / backward | 78 / 79 us | 134 / 163 us | 1.72x / 2.06x |" in text
    assert "11.7 ms, 1.30 GiB | 13.1 ms, 1.53 GiB | 1.12x" in text
    assert "64k tokens, training step (peer: our dense layer) | 500.0 ms | 1200.0 ms | 2.40x" in text
    assert (results / "overview.png").stat().st_size > 5000
    assert "wrote" in capsys.readouterr().out


def test_missing_markers_are_refused(script):
    with pytest.raises(ValueError, match="markers"):
        script("plot").replace_between("# readme", "x")


def test_rows_come_from_the_newest_run_that_measured_them(script, record, results):
    plot, measure = script("plot"), script("measure")
    later = record("rope")
    later.environment |= {"device": "NVIDIA H200", "date": "2026-12-01T08:00:00+00:00"}
    later.add("glm5_q/forward", "ours", measure.Timing(60.0, 60.0, 60.0, 1.0, 3))
    later.add("glm5_q/backward", "ours", measure.Failure("error", "out of memory"))
    later.write(results)
    records = plot.newest(results)
    assert plot.row_of(records, "rope", "glm5_q/forward", "ours")["us"] == 60.0
    assert plot.row_of(records, "rope", "glm5_q/forward", "megatron") is None, "never a peer of another run"
    assert plot.row_of(records, "rope", "glm5_q/backward", "ours")["us"] == 79.0, "a failed run replaces nothing"


def test_no_results(script, tmp_path, capsys):
    assert script("plot").main(["--results", str(tmp_path)]) == 1
    assert "no benchmark JSON" in capsys.readouterr().out
