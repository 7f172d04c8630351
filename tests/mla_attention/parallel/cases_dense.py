"""Dense layers: every layout, both token layouts, and what a config may ask for on top."""

from mla_attention.configs import MLAConfig, tiny
from tests.mla_attention.parallel.layouts import Layout, compare, packed
from tests.mla_attention.parallel.ranks import case

LAYOUTS = {
    2: {
        "tp": Layout(tp=2),
        "tp_sp": Layout(tp=2, sequence_parallel=True),
        "cp": Layout(cp=2),
    },
    4: {
        "tp4": Layout(tp=4),
        "tp4_sp": Layout(tp=4, sequence_parallel=True),
        "cp4": Layout(cp=4),
        "tp2_cp2": Layout(tp=2, cp=2),
        "tp2_cp2_sp": Layout(tp=2, cp=2, sequence_parallel=True),
    },
}
CONFIGS: dict[str, MLAConfig] = {
    "plain": tiny(),
    "no_query_latent": tiny(q_lora_rank=None),
    "fused_down_projection": tiny(mla_down_proj_fusion=True),
    "bias": tiny(add_bias_linear=True),
    "recompute": tiny(recompute_up_proj=True),
    "gemm": tiny(kv_assembly="gemm"),
    "eager_attention": tiny(core_attention_backend="reference"),
    "gemm_recompute": tiny(kv_assembly="gemm", recompute_up_proj=True),
}
for world, layouts in LAYOUTS.items():
    for layout_name, layout in layouts.items():
        for config_name, config in CONFIGS.items():
            if world == 4 and config_name not in ("plain", "no_query_latent", "bias", "recompute"):
                continue

            @case(world, f"dense/{layout_name}/{config_name}/sbhd")
            def sbhd(layout: Layout = layout, config: MLAConfig = config) -> None:
                compare(layout, config)

            @case(world, f"dense/{layout_name}/{config_name}/packed")
            def thd(layout: Layout = layout, config: MLAConfig = config) -> None:
                compare(layout, config, pack=packed())
