"""What checkpoint functions and context-parallel shards refuse of the wrong kind, in one line."""

import pytest
import torch

from mla_attention import MLASelfAttention, PackedSeqParams, gather_sequence_from_cp, shard_sequence_for_cp
from mla_attention.checkpoint import (
    load_hf_state_dict,
    load_megatron_state_dict,
    to_hf_state_dict,
    to_megatron_state_dict,
)
from mla_attention.configs import tiny

CONVERSIONS = [(load_hf_state_dict, to_hf_state_dict), (load_megatron_state_dict, to_megatron_state_dict)]


def refused(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("load", "save"), CONVERSIONS)
def test_checkpoints(load, save):
    layer = MLASelfAttention(tiny())
    tensors = save(layer)
    name = next(iter(tensors))
    for module in (None, torch.nn.Linear(2, 2)):
        refused(lambda m=module: load(m, tensors), "module: given .*, allowed is an MLASelfAttention")
        refused(lambda m=module: save(m), "module: given .*, allowed is an MLASelfAttention")
    refused(lambda: load(layer, tensors, None), "prefix: given None, allowed is a str")
    refused(lambda: save(layer, 3), "prefix: given int, allowed is a str")
    refused(lambda: load(layer, tensors | {3: torch.zeros(1)}), "tensors must have keys of type str, got 3")
    refused(lambda: load(layer, tensors | {name: tensors[name].to_sparse()}), "dense torch tensors, got .*sparse_coo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 0, 2), "t: given None, allowed is a Tensor"),
        ((torch.arange(8), 0, 2.0), "cp_size: given 2.0, allowed are integers >= 1"),
        ((torch.arange(8), None, 2), "cp_rank: given None, allowed are integers >= 0"),
        ((torch.arange(8), 0, 2, 1), r"dim: given 1, allowed are the dims of t, which has shape \[8\]"),
        ((torch.tensor(1.0), 0, 2), r"dim: given 0, allowed are the dims of t, which has shape \[\]"),
        ((torch.arange(8), 0, 2, 0, [0, 8]), "packed_seq_params: given list, allowed is a PackedSeqParams"),
        ((torch.arange(8), 0, 2, 0, PackedSeqParams([0, 16])), "offsets end at 16, allowed is at most the 8 rows of t"),
    ],
)
def test_shards(arguments, message):
    t, rank, size, *rest = arguments
    options = dict(zip(("dim", "packed_seq_params"), rest, strict=False))
    refused(lambda: shard_sequence_for_cp(t, rank, size, **options), message)


def test_gathering():
    refused(lambda: gather_sequence_from_cp(torch.arange(8), "cp"), "group: given str, allowed is a ProcessGroup")
    refused(lambda: gather_sequence_from_cp(None, None), "t: given None, allowed is a Tensor")
