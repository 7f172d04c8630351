"""The public names and their signatures: users call exactly these."""

import inspect
import subprocess
import sys

import pytest

import mla_attention
from mla_attention import checkpoint, configs, fusions
from mla_attention.fusions import reference
from mla_attention.integrations import megatron

LAYER = mla_attention.MLASelfAttention
ROTATION = "cu_seqlens_q=None, cp_rank=0, cp_size=1"
QUERY = (
    f"t, cos, sin, nope_dim, emb_dim, {ROTATION}, rotary_interleaved=False, "
    "inverse=False, remove_interleaving=False, position_ids=None, rope_first=False, input_halves=False"
)
RAW = (
    f"t, cos, sin, nope_dim, emb_dim, {ROTATION}, inverse=False, remove_interleaving=False, "
    "position_ids=None, rope_first=False, input_halves=False"
)
KEY_VALUE = (
    "kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim, cu_seqlens_kv=None, cp_rank=0, cp_size=1, "
    "rotary_interleaved=False, remove_interleaving=False, position_ids=None"
)
INDEXER = "relu=True, cu_seqlens=None, q_positions=None, budget_bytes=1073741824"

FUSIONS = {
    "fused_mla_rope_inplace": QUERY,
    "fused_mla_rope_out_of_place": QUERY,
    "fused_mla_rope_kv_split": KEY_VALUE,
    "fused_apply_mla_rope_for_kv": KEY_VALUE,
    "fused_mla_rope_concat": "nope, rope, cos, sin, cu_seqlens=None, cp_rank=0, cp_size=1, position_ids=None",
    "mla_rope_apply_raw_": RAW,
    "mla_rope_unapply_raw": f"{RAW}, out=None",
    "indexer_topk": f"index_q, index_k, index_weights, topk, *, {INDEXER}",
    "indexer_scores": f"index_q, index_k, index_weights, *, {INDEXER}",
    "topk_select": "scores, topk",
    "sparse_mla": "query, key, topk_indices, softmax_scale, kv_rank",
}

OTHERS = [
    (LAYER, "config, layer_number=1, *, backend='torch', tp_group=None, cp_group=None, device=None, dtype=None"),
    (
        LAYER.forward,
        "self, hidden_states, attention_mask=None, *, packed_seq_params=None, position_ids=None, topk_indices=None, "
        "cache=None, return_aux=False",
    ),
    (LAYER.get_query_key_value_tensors, "self, hidden_states, *, packed_seq_params=None, position_ids=None"),
    (LAYER.clip_qk, "self, max_logits, threshold=None, alpha=None"),
    (
        mla_attention.PackedSeqParams,
        "cu_seqlens_q, cu_seqlens_kv=None, *, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
        "max_seqlen_q=None, max_seqlen_kv=None, qkv_format='thd', validate=True",
    ),
    (mla_attention.LatentCache, "config, batch_size, max_length, *, device, dtype"),
    (mla_attention.RotaryEmbedding, "dim, base"),
    (mla_attention.RotaryEmbedding.cos_sin, "self, length, *, device, cp_rank=0, cp_size=1, packed=False"),
    (mla_attention.should_use_fused_mla_rope, "config"),
    (
        mla_attention.parallelize,
        "module, mesh, *, tp_dim='tp', cp_dim='cp', dp_dim='dp', sequence_parallel=False",
    ),
    (mla_attention.shard_sequence_for_cp, "t, cp_rank, cp_size, *, dim=0, packed_seq_params=None"),
    (mla_attention.gather_sequence_from_cp, "t, group, *, dim=0, packed_seq_params=None"),
    (configs.tiny, "**overrides"),
    (configs.get_preset, "name, **overrides"),
    (configs.from_hf_config, "config, *, layer_idx=None, **overrides"),
    (checkpoint.load_hf_state_dict, "module, tensors, prefix='', *, block_size=(128, 128)"),
    (checkpoint.to_hf_state_dict, "module, prefix=''"),
    (checkpoint.load_megatron_state_dict, "module, tensors, prefix=''"),
    (checkpoint.to_megatron_state_dict, "module, prefix='', *, fused_norm=False"),
    (megatron.patch, ""),
    (megatron.unpatch, ""),
]


def parameters(function) -> str:
    """The parameters as they would be written, without their types."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))[1:-1]


@pytest.mark.parametrize("name", FUSIONS)
def test_kernel_functions(name):
    assert parameters(getattr(fusions, name)) == FUSIONS[name]


def test_every_kernel_function_has_a_twin_of_the_same_signature():
    assert fusions.__all__ == reference.__all__
    assert set(FUSIONS) | {"fused_apply_mla_rope_for_q", "indexer_kl"} <= set(fusions.__all__)
    for name in fusions.__all__:
        assert inspect.signature(getattr(fusions, name)) == inspect.signature(getattr(reference, name)), name


def test_megatrons_query_function_begins_as_megatrons():
    """Its fourth argument has two names; positions are those of megatron-core 0.19.2."""
    found = parameters(fusions.fused_apply_mla_rope_for_q)
    names = [parameter.split("=")[0] for parameter in found.split(", ")]
    expected = QUERY.replace("nope_dim", "qk_head_dim", 1).split(", ")
    assert names == [*(parameter.split("=")[0] for parameter in expected), "*", "nope_dim"]


def test_indexer_divergence():
    found = parameters(fusions.indexer_kl)
    assert found.startswith(
        "index_q, index_k, index_weights, query, key, softmax_scale, *, topk_indices=None, relu=True, cu_seqlens=None, "
    )


def test_yarn_embedding():
    names = list(inspect.signature(mla_attention.YarnRotaryEmbedding).parameters)
    assert names == [
        *("dim", "base", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate", "attention_factor"),
    ]


@pytest.mark.parametrize(("function", "expected"), OTHERS, ids=[function.__qualname__ for function, _ in OTHERS])
def test_signatures(function, expected):
    assert parameters(function) == expected


@pytest.mark.parametrize("package", [mla_attention, fusions, reference, configs, checkpoint])
def test_every_public_name_is_there_and_listed(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    code = f"import {package.__name__} as package; print(sorted(set(package.__all__) - set(dir(package))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"  # before any name is used


@pytest.mark.parametrize("package", [fusions, reference])
def test_docstrings_say_what_goes_in_comes_out_is_refused_and_where_it_is_from(package):
    for name in package.__all__:
        text = inspect.getdoc(getattr(package, name))
        missing = [word for word in ("Args", "Returns", "Raises", "Source") if word not in text]
        assert not missing, (name, missing)
