"""What is refused, on every rank, in one line with both numbers."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mla_attention import (
    LatentCache,
    MLASelfAttention,
    PackedSeqParams,
    gather_sequence_from_cp,
    parallelize,
    shard_sequence_for_cp,
)
from mla_attention.configs import tiny
from tests.mla_attention.parallel.cases_sparse import DSA
from tests.mla_attention.parallel.layouts import Layout, build, world_group
from tests.mla_attention.parallel.ranks import case

WIDTH = tiny().hidden_size


def refused(function: Callable[[], object], *words: object) -> None:
    """`function` raises a one-line ValueError that holds the words, numbers as whole numbers."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        function()
    text = str(caught.value)
    for word in words:
        assert re.search(rf"(?<![\w]){re.escape(str(word))}(?![\w])", text), (word, text)


def hidden(rows: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(rows, batch, WIDTH, dtype=torch.float64)


@case(4, "heads")
def heads() -> None:
    config = tiny(num_attention_heads=6)
    refused(lambda: MLASelfAttention(config, tp_group=world_group()), "num_attention_heads", 6, 4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(build(tiny()), build(config))
    refused(lambda: parallelize(model, mesh), "num_attention_heads", 6, 4)
    assert all(type(parameter.data) is torch.Tensor for parameter in model.parameters())  # nothing was changed
    assert model[0].num_heads == tiny().num_attention_heads
    assert model[0].comm.tp_size == 1


@case(2, "lengths")
def lengths() -> None:
    rank = dist.get_rank()
    layer = parallelize(build(tiny()), Layout(tp=2).mesh(), sequence_parallel=True)
    refused(lambda: layer(hidden(4 - rank)), "hidden_states", 7, 2)
    for length in (6, 10):
        layer = parallelize(build(tiny()), Layout(cp=2).mesh())
        refused(lambda length=length, layer=layer: layer(hidden(length // 2)), "hidden_states", length, 4)
    layer = parallelize(build(tiny()), Layout(cp=2).mesh())
    refused(lambda: layer(hidden(4 - rank)), "hidden_states", 7, 4)
    layer = parallelize(build(tiny()), Layout(cp=2).mesh())
    refused(lambda: layer(hidden(4, 1 + rank)), "hidden_states", 1, 2)
    for offsets, length in (([0, 8, 14], 6), ([0, 6, 16], 6), ([0, 4, 5, 16], 1)):
        pack = PackedSeqParams(offsets)
        layer = parallelize(build(tiny()), Layout(cp=2).mesh())
        refused(lambda layer=layer, pack=pack: layer(hidden(8), packed_seq_params=pack), "packed_seq_params", length, 4)
        refused(lambda pack=pack: shard_sequence_for_cp(hidden(16), 0, 2, packed_seq_params=pack), length, 4)
    padded = PackedSeqParams([0, 6, 7], cu_seqlens_q_padded=[0, 8, 12])
    layer(hidden(6), packed_seq_params=padded)
    refused(lambda: layer(hidden(5), packed_seq_params=padded), "packed_seq_params", 12, 10)
    for config in (tiny(), tiny(**DSA)):
        nothing = parallelize(build(config), Layout(cp=2).mesh())(hidden(0))[0]
        assert nothing.shape == (0, 1, WIDTH)


@case(2, "shards")
def shards() -> None:
    refused(lambda: shard_sequence_for_cp(hidden(6), 0, 2), 6, 4)
    refused(lambda: shard_sequence_for_cp(hidden(8), 2, 2), "cp_rank", 2)
    refused(lambda: shard_sequence_for_cp(hidden(7), 0, 2, packed_seq_params=PackedSeqParams([0, 4])), 7, 2)
    assert shard_sequence_for_cp(hidden(7), 0, 1).shape[0] == 7
    refused(lambda: gather_sequence_from_cp(hidden(3), world_group()), 6, 4)


@case(2, "meshes")
def meshes() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    refused(lambda: parallelize(build(tiny()), mesh, cp_dim="cp"), "cp_dim", "'cp'", "tp")
    refused(lambda: parallelize(build(tiny()), mesh, dp_dim="data"), "dp_dim", "'data'", "tp")
    refused(lambda: parallelize(nn.Linear(2, 2), mesh), "module", "Linear")
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    refused(lambda: parallelize(build(tiny()), other, sequence_parallel=True), "sequence_parallel", 1)
    unnamed = init_device_mesh("cpu", (2,))
    refused(lambda: parallelize(build(tiny()), unnamed), "mesh")
    layer = parallelize(build(tiny()), mesh)
    for again in (mesh, other):
        refused(lambda again=again: parallelize(layer, again), "module", 1)
    refused(lambda: parallelize(MLASelfAttention(tiny(), tp_group=world_group()), other), "module")
    sharded = fully_shard(build(tiny()), mesh=other)
    refused(lambda: parallelize(sharded, mesh), "module")
    named = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    assert parallelize(build(tiny()), named, tp_dim="tensor").num_heads == 2
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    assert parallelize(build(tiny()), both, dp_dim=None).num_heads == 4


@case(4, "process_groups")
def process_groups() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    tp, cp = mesh.get_group("tp"), mesh.get_group("cp")
    refused(lambda: MLASelfAttention(tiny(), tp_group=tp, cp_group=world_group()), "tp_group", "cp_group", 0, 3)
    refused(lambda: MLASelfAttention(tiny(), tp_group=tp, cp_group=tp), "tp_group", "cp_group")
    foreign = dist.new_group([0, 1])
    if rank > 1:
        refused(lambda: MLASelfAttention(tiny(), tp_group=foreign), "tp_group")
    layer = MLASelfAttention(tiny(), tp_group=tp, cp_group=cp if rank in (0, 2) else None, dtype=torch.float64)
    refused(lambda: layer(hidden(4)), "cp_group", 1, 2)  # groups of different worlds, seen by all


@case(2, "arguments_that_exclude_context_parallelism")
def exclusions() -> None:
    layer = parallelize(build(tiny()), Layout(cp=2).mesh())
    mask = torch.zeros(8, 8, dtype=torch.bool)
    refused(lambda: layer(hidden(4), mask), "attention_mask", "context parallelism")
    cache = LatentCache(tiny(), 1, 8, device="cpu", dtype=torch.float64)
    refused(lambda: layer(hidden(4), cache=cache), "cache")
    refused(lambda: layer(hidden(4), position_ids=torch.arange(8)), "position_ids", 8, 4)
    unread = PackedSeqParams([0, 8], max_seqlen_q=8, validate=False)
    forced = parallelize(build(tiny(core_attention_backend="sdpa")), Layout(cp=2).mesh())
    refused(lambda: forced(hidden(4), packed_seq_params=unread), "validate=False")
    layer(hidden(4), packed_seq_params=unread)  # auto has another back end


@case(2, "core_attention_without_context_parallelism")
def core_attention() -> None:
    layer = parallelize(build(tiny(core_attention_backend="sdpa")), Layout(cp=2).mesh())
    layer.core_attention.context_parallel = False
    refused(lambda: layer(hidden(4)), "core_attention_backend", "'sdpa'", "context parallelism")


@case(2, "no dim of ours")
def no_dim_of_ours() -> None:
    """Default names that the mesh lacks mean size 1; what is no mesh is refused."""
    whole = build(tiny())
    layer = parallelize(build(tiny()), init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)))
    rows = hidden(4)
    assert torch.equal(layer(rows)[0], whole(rows)[0])
    refused(lambda: parallelize(build(tiny()), None), "mesh", "NoneType", "DeviceMesh")  # type: ignore[arg-type]
