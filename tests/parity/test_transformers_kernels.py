"""Layers with the Triton kernels equal transformers' too. Few tokens: off a GPU the kernels are interpreted."""

import pytest
import torch

from tests.parity.transformers_layers import (
    PLAIN,
    YARN,
    assert_same,
    build_pair,
    published,
    random_tokens,
    run_ours,
    run_theirs,
    visible_sets,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter, set off a GPU only")

CONFIGS = {
    "deepseek_v2 plain query": published("deepseek_v2", q_lora_rank=None, **YARN),
    "deepseek_v3": published("deepseek_v3", **YARN),
    "glm_moe_dsa dense": published("glm_moe_dsa", **PLAIN),
    "glm_moe_dsa sparse": published("glm_moe_dsa", index_topk=2, **PLAIN),
    "deepseek_v32 sparse": published("deepseek_v32", index_topk=2, **YARN),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_fused_rope(config) -> None:
    pair = build_pair(config, apply_rope_fusion=True)
    tokens = random_tokens(5)
    assert_same(run_ours(pair, *tokens), run_theirs(pair, *tokens))


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_dsa_kernels(family) -> None:
    pair = build_pair(published(family, index_topk=2, **YARN), apply_rope_fusion=True)
    pair.ours.core_attention.kernels = "triton"
    tokens = random_tokens(5)
    ours, theirs = run_ours(pair, *tokens), run_theirs(pair, *tokens)
    assert_same(ours, theirs)
    assert visible_sets(ours.topk_indices) == visible_sets(theirs.topk_indices)
