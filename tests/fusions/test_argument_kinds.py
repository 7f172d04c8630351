"""Arguments that are no tensors, no integers or no numbers: kernels and twins refuse them alike, before any launch."""

import inspect

import pytest
import torch

from mla_attention import RotaryEmbedding, fusions
from mla_attention.fusions import reference

COS, SIN = RotaryEmbedding(8, 1e4).cos_sin(16, device="cpu")
TABLES = dict(cos=COS, sin=SIN)
QUERY = dict(t=torch.randn(4, 2, 3, 12), nope_dim=4, emb_dim=8, **TABLES)
KEY_VALUE = dict(kv=torch.randn(4, 2, 3, 10), k_pos_emb=torch.randn(4, 2, 1, 8), emb_dim=8, k_dim=4, v_dim=6, **TABLES)
INDEXER = dict(index_q=torch.randn(6, 2, 8), index_k=torch.randn(6, 8), index_weights=torch.randn(6, 2))
ATTENTION = dict(query=torch.randn(6, 3, 12), key=torch.randn(6, 12), softmax_scale=0.1)
ARGUMENTS = {
    "fused_mla_rope_inplace": QUERY,
    "fused_mla_rope_out_of_place": QUERY,
    "mla_rope_apply_raw_": QUERY,
    "mla_rope_unapply_raw": QUERY,
    "fused_apply_mla_rope_for_q": QUERY,
    "fused_mla_rope_kv_split": KEY_VALUE,
    "fused_apply_mla_rope_for_kv": KEY_VALUE,
    "fused_mla_rope_concat": dict(nope=torch.randn(4, 2, 3, 5), rope=torch.randn(4, 2, 3, 8), **TABLES),
    "indexer_scores": INDEXER,
    "indexer_topk": INDEXER | dict(topk=3),
    "topk_select": dict(scores=torch.randn(6, 6), topk=3),
    "sparse_mla": ATTENTION | dict(topk_indices=torch.zeros(6, 1, dtype=torch.int64), kv_rank=8),
    "indexer_kl": INDEXER | ATTENTION,
}
OPTIONAL = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "position_ids", "q_positions", "topk_indices", "lse", "out")


def optional_tensors(name):
    """Those of its optional arguments that are tensors."""
    taken = inspect.signature(getattr(reference, name)).parameters
    return [argument for argument in OPTIONAL if argument in taken and argument not in ARGUMENTS[name]]


def refuse(module, name, argument, value):
    with pytest.raises(ValueError, match=rf"^{argument} must be ") as error:
        getattr(module, name)(**ARGUMENTS[name] | {argument: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("module", [reference, fusions], ids=["twin", "kernel"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_is_of_its_kind(module, name):
    for argument, good in ARGUMENTS[name].items():
        if isinstance(good, torch.Tensor):
            for value in (None, [1.0], good.to_sparse()):
                refuse(module, name, argument, value)
        else:
            for value in ("3", True, torch.tensor(3), *((2.5,) if isinstance(good, int) else (float("nan"),))):
                refuse(module, name, argument, value)


@pytest.mark.parametrize("module", [reference, fusions], ids=["twin", "kernel"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_optional_tensors_are_tensors(module, name):
    packed = {
        key: value[:, 0] if key not in TABLES and torch.is_tensor(value) and value.ndim == 4 else value
        for key, value in ARGUMENTS[name].items()
    }
    for argument in optional_tensors(name):
        arguments = packed if argument.startswith("cu_seqlens") else ARGUMENTS[name]
        with pytest.raises(ValueError, match=f"^{argument} must be a tensor, got list$"):
            getattr(module, name)(**arguments | {argument: [0, 6]})


@pytest.mark.parametrize("module", [reference, fusions], ids=["twin", "kernel"])
@pytest.mark.parametrize("argument", ["cp_rank", "cp_size"])
def test_ranks_are_integers(module, argument):
    for value in (None, 1.0, "1", True):
        refuse(module, "fused_mla_rope_out_of_place", argument, value)
