"""Text of a layer's report and of the list of presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mla_attention.configs import PRESETS, get_preset
from mla_attention.report import LayerReport, count_parameters
from mla_attention.rotary import softmax_scale

__all__ = ["preset_table", "report_text"]


def preset_table() -> str:
    """One line a preset: dims, rope, attention, parameters of one layer, softmax scale."""
    header = ("preset", "hidden", "heads", "Rq", "Rkv", "Dn/Dr/Dv", "rope", "attention", "parameters", "softmax scale")
    rows = [header]
    for name in PRESETS:
        config = get_preset(name)
        rope = f"{config.rope_type} {config.rotary_base:g}"
        if config.rope_type == "yarn":
            rope += f" x{config.rotary_scaling_factor:g}"
        rows.append(
            (
                name,
                str(config.hidden_size),
                str(config.num_attention_heads),
                str(config.q_lora_rank),
                str(config.kv_lora_rank),
                f"{config.qk_head_dim}/{config.qk_pos_emb_head_dim}/{config.v_head_dim}",
                rope,
                config.experimental_attention_variant or "dense",
                f"{sum(count_parameters(config).values()) / 1e6:.2f} M",
                f"{softmax_scale(config):.6f}",
            )
        )
    return "\n".join(_columns(rows))


def report_text(title: str, report: LayerReport) -> str:
    """A report as lines of text.

    Args:
        title: what the layer is called.
        report: its figures.

    Returns:
        Text without a final newline.
    """
    config, bits = report.config, 8 * report.element_bytes
    query_rank = "no query compression" if config.q_lora_rank is None else f"query rank {config.q_lora_rank}"
    lines = [
        f"{title}: {config.experimental_attention_variant or 'dense'} attention, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {query_rank}, key/value rank {config.kv_lora_rank}, "
        f"Dn/Dr/Dv {config.qk_head_dim}/{config.qk_pos_emb_head_dim}/{config.v_head_dim}",
        f"softmax scale {report.softmax_scale:.6f}",
        "",
        "parameters",
        *_figures(report.parameters, report.total_parameters, lambda count: f"{count:,.0f}"),
        "",
        f"forward FLOPs per token, mean over one sequence of {report.seq_len:,} tokens",
        *_figures(report.forward_flops, report.total_forward_flops, lambda flops: f"{flops / 1e6:,.1f} M"),
        "",
        f"activation bytes per token kept for the backward, {bits}-bit elements",
        *_figures(report.activation_bytes, report.total_activation_bytes, lambda size: f"{size:,.0f}"),
        "",
        f"cache bytes per token, {bits}-bit elements",
        *_columns(
            [
                ("  latent", f"{report.latent_cache_bytes:,}"),
                ("  full keys and values", f"{report.full_cache_bytes:,}"),
                ("  ratio", f"{report.full_cache_bytes / report.latent_cache_bytes:.1f}"),
            ]
        ),
        "",
        "rope",
        *(f"  {name}: {value}" for name, value in report.rope.items()),
        "",
        "back ends",
        *(f"  {name}: {value}" for name, value in report.backends.items()),
    ]
    return "\n".join(lines)


def _figures(figures: Mapping[str, float], total: float, number: Callable[[float], str]) -> list[str]:
    rows = [(f"  {name}", number(value)) for name, value in figures.items()]
    return _columns([*rows, ("  total", number(total))])


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells as aligned lines, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
