"""Layers on Transformer Engine's modules (a stand-in for them) in parallel, held to one rank's torch layer.

Its linear layers read their weight through a method that the layers here override, and the norms that they apply
themselves see a rank's own heads only: both have to hand the ranks' gradients on.
"""

import pytest
import torch

from mla_attention import MLASelfAttention, parallelize
from mla_attention.configs import MLAConfig
from tests.mla_attention.checkpoint.layers import DSA
from tests.mla_attention.layers import fake_transformer_engine as fake
from tests.mla_attention.parallel.cases_dense import CONFIGS, LAYOUTS
from tests.mla_attention.parallel.layouts import Layout, assert_close, assert_gradients, build, packed, step
from tests.mla_attention.parallel.ranks import case

CASES = {"plain": CONFIGS["plain"], "recompute": CONFIGS["recompute"], "bias": CONFIGS["bias"]}
CASES["dsa"] = MLAConfig(**{**vars(CONFIGS["plain"]), **DSA})


def te_layer_equals_one_rank(layout: Layout, config: MLAConfig, packing: bool) -> None:
    """Output, input gradient and every parameter's gradient."""
    reference = build(config)
    mesh = layout.mesh()
    pack = packed() if packing else None
    with pytest.MonkeyPatch.context() as patch:
        fake.install(patch)
        layer = MLASelfAttention(config, backend="te", dtype=torch.float64)
        layer.load_state_dict(reference.state_dict())
        parallelize(layer, mesh, sequence_parallel=layout.sequence_parallel)
        torch.manual_seed(1)
        hidden, gradient = (torch.randn(32, 1, config.hidden_size, dtype=torch.float64) for _ in range(2))
        output, hidden_gradient, _ = step(reference, hidden, gradient, packed_seq_params=pack)
        own = [layout.cut(t, mesh, pack) for t in (hidden, gradient)]
        found, found_gradient, _ = step(layer, *own, packed_seq_params=pack)
    assert_close(found, layout.cut(output, mesh, pack), 1e-9, "output")
    assert_close(found_gradient, layout.cut(hidden_gradient, mesh, pack), 1e-9, "input gradient")
    assert_gradients(layer, reference, 1e-9, config.qk_pos_emb_head_dim)


for layout_name, layout in LAYOUTS[2].items():
    for config_name, config in CASES.items():

        @case(2, f"te/{layout_name}/{config_name}")
        def te_case(
            layout: Layout = layout, config: MLAConfig = config, packing: bool = config_name == "plain"
        ) -> None:
            te_layer_equals_one_rank(layout, config, packing)
