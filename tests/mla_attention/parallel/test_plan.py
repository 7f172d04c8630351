"""The plan names the layers that checkpoints cut, and layers that exist."""

import pytest

from mla_attention import MLASelfAttention
from mla_attention.checkpoint.parameters import TABLE
from mla_attention.configs import tiny
from mla_attention.parallel.plan import HEAD_DIMS, ON_SEQUENCE_SLICES

DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 4,
}


def test_checkpoints_are_cut_alike() -> None:
    assert {entry.ours: entry.tp_dim for entry in TABLE if entry.tp_dim is not None} == HEAD_DIMS


@pytest.mark.parametrize("config", [tiny(q_lora_rank=None), tiny(**DSA)], ids=["no query latent", "dsa"])
def test_every_name_is_a_layer(config) -> None:
    names = {name for name, _ in MLASelfAttention(config, device="meta").named_modules()}
    other = {name for name, _ in MLASelfAttention(tiny(**DSA), device="meta").named_modules()}
    known = names | other | {"linear_q_proj"}
    assert set(HEAD_DIMS) | set(ON_SEQUENCE_SLICES) <= known
