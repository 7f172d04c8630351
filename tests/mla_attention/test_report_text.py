from mla_attention.configs import PRESETS, deepseek_v3, glm5
from mla_attention.report import layer_report
from mla_attention.report_text import preset_table, report_text


def test_table_has_one_aligned_line_a_preset() -> None:
    header, *lines = preset_table().splitlines()
    assert header.split()[0] == "preset"
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert len({len(line) for line in [header, *lines]}) == 1
    assert "0.135234" in lines[PRESETS.index("deepseek_v3")]
    assert "187.11 M" in lines[PRESETS.index("deepseek_v3")]


def test_report_shows_every_figure() -> None:
    report = layer_report(glm5(), seq_len=32768)
    text = report_text("glm5", report)
    assert text.splitlines()[0].startswith("glm5: dsa attention, hidden 6144, 64 heads, query rank 2048")
    for figures in (report.parameters, report.forward_flops, report.activation_bytes, report.rope, report.backends):
        for name in figures:
            assert name in text
    for figure in ("174,394,112", "32,768 tokens", "1,408", "65,536", "46.5", "softmax scale 0.062500"):
        assert figure in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_projection_and_cache_figures_of_deepseek_v3() -> None:
    lines = [line.split() for line in report_text("deepseek_v3", layer_report(deepseek_v3())).splitlines()]
    assert ["linear_proj", "117,440,512"] in lines
    assert ["projections", "374.2", "M"] in lines
    assert ["latent", "1,152"] in lines
    assert ["ramp:", "channels", "10", "to", "23"] in lines
