"""Sparse layers: indexer, selection and loss in every layout."""

import torch

from mla_attention.configs import MLAConfig, tiny
from tests.mla_attention.parallel.cases_dense import LAYOUTS
from tests.mla_attention.parallel.layouts import Layout, compare, packed
from tests.mla_attention.parallel.ranks import case

DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 4,
    "dsa_indexer_loss_coeff": 0.7,
}
CONFIGS: dict[str, MLAConfig] = {
    "sparse_loss": tiny(**DSA, dsa_indexer_use_sparse_loss=True),
    "dense_loss": tiny(**DSA),
    "warm_up": tiny(**DSA, dsa_mode="dense_warmup"),
    "few_keys": tiny(**{**DSA, "dsa_indexer_topk": 64}),
    "summed_loss": tiny(**DSA, calculate_per_token_loss=True, dsa_indexer_rope_interleaved=True),
    "recompute": tiny(**DSA, dsa_indexer_use_sparse_loss=True, recompute_up_proj=True),
    "no_loss": tiny(**{**DSA, "dsa_indexer_loss_coeff": 0.0}, dsa_indexer_rotate_activation=True),
}
for world, layouts in LAYOUTS.items():
    for layout_name, layout in layouts.items():
        for config_name, config in CONFIGS.items():
            if world == 4 and config_name not in ("sparse_loss", "dense_loss", "recompute"):
                continue

            @case(world, f"sparse/{layout_name}/{config_name}/sbhd")
            def sbhd(layout: Layout = layout, config: MLAConfig = config) -> None:
                compare(layout, config, options={"return_aux": True})

            @case(world, f"sparse/{layout_name}/{config_name}/packed")
            def thd(layout: Layout = layout, config: MLAConfig = config) -> None:
                compare(layout, config, pack=packed(), options={"return_aux": True})

        @case(world, f"sparse/{layout_name}/attached_loss_fp32")
        def attached(layout: Layout = layout) -> None:
            compare(layout, CONFIGS["sparse_loss"], dtype=torch.float32, tolerance=2e-5)
