"""`parallelize`: full attention layers to one rank's share of them, in place, from outside the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mla_attention.attention import MLASelfAttention
from mla_attention.layers.torch_layers import LocalParameters
from mla_attention.parallel.group_communication import GroupCommunication
from mla_attention.parallel.plan import HEAD_DIMS


class _DefaultName(str):
    """A dim name that nobody passed: the mesh may lack it."""


_TP, _CP, _DP = _DefaultName("tp"), _DefaultName("cp"), _DefaultName("dp")


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    tp_dim: str | None = _TP,
    cp_dim: str | None = _CP,
    dp_dim: str | None = _DP,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Spread every `MLASelfAttention` of a module over a mesh, in place.

        tp      q and kv up projections by heads (rows), linear_proj by columns: DTensors under the same names
        cp      zigzag shards of the sequence; the key latents are gathered, or see `MLAConfig.cp_comm_type`
        dp      `fully_shard` (FSDP2) of each attention layer

    Replicated parameters stay plain tensors whose gradients are complete when backward returns; parameters of the first
    rank of each group are the ones kept. Everything outside the attention layers is left alone. What takes lists of
    tensors (`foreach` and `fused` optimizers, `clip_grad_norm_`) wants plain tensors and the DTensors of each mesh in
    lists of their own.

    Layers can be deep-copied and pickled (but not under FSDP, which torch refuses). A pickle finds its process groups
    again where the same ranks have started them; elsewhere its first forward raises. To move weights between layouts
    use `torch.distributed.checkpoint` or `mla_attention.checkpoint`.

    A rank that fails leaves the others waiting in a collective, with gloo until its connections close, with NCCL until
    the timeout of the process group; they then raise. Choose it with `init_process_group(timeout=...)`: torch's default
    is 10 minutes for NCCL and 30 for gloo.

    Args:
        module: an `MLASelfAttention`, or any module that contains some; parameters may be on the meta device.
        mesh: named device mesh; dims that are not named here are left to the caller.
        tp_dim, cp_dim, dp_dim: names of its dims. A default name that the mesh lacks means size 1, as None does; a
            mesh with none of them leaves the layers as they are.
        sequence_parallel: hidden states are slices of the sequence (of its context-parallel shard) on each tp rank.

    Returns:
        `module`.

    Raises:
        ValueError: before anything is changed, for a mesh without names, a named dim that it lacks, heads that tp does
            not divide, sequence parallelism without tp > 1, or a module that has no attention layers or was
            parallelized before.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        >>> parallelize(model, mesh, sequence_parallel=True)

    Source: applied from outside as in torchtitan; the layout of Megatron-LM's MLASelfAttention.
    """
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
        given = f"{type(mesh).__name__} without named dims" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ValueError(f"mesh: given {given}, allowed is a torch DeviceMesh with named dims")
    groups = {name: _group(mesh, dim, name) for name, dim in (("tp", tp_dim), ("cp", cp_dim), ("dp", dp_dim))}
    every = GroupCommunication.over(groups["tp"], groups["cp"], sequence_parallel=sequence_parallel)
    layers = [part for part in module.modules() if isinstance(part, MLASelfAttention)]
    if not layers:
        raise ValueError(
            f"module: given a {type(module).__name__} without an MLASelfAttention, allowed is one with some"
        )
    comms = [replace(every, cp_comm_type=layer.config.cp_comm_type) for layer in layers]
    for layer, comm in zip(layers, comms, strict=True):
        _check(layer, comm)
    for layer, comm in zip(layers, comms, strict=True):
        for group in groups.values():
            _take_first_ranks_parameters(layer, group)
        if comm.tp is not None:
            _shard_heads(layer, mesh[str(tp_dim)])
        layer.comm = comm
        layer.num_heads = comm.heads_of_rank(layer.config.num_attention_heads)
        comm.attach(layer)
        if groups["dp"] is not None and groups["dp"].size() > 1:
            _fully_shard(layer, mesh[str(dp_dim)])
    return module


def _names(mesh: DeviceMesh) -> str:
    return ", ".join(mesh.mesh_dim_names) if mesh.mesh_dim_names else "without names"


def _group(mesh: DeviceMesh, dim: str | None, name: str) -> ProcessGroup | None:
    if dim is None:
        return None
    if not mesh.mesh_dim_names or dim not in mesh.mesh_dim_names:
        if isinstance(dim, _DefaultName):
            return None
        raise ValueError(f"{name}_dim: given {dim!r}, allowed are dims of the mesh: {_names(mesh)}")
    return mesh.get_group(str(dim))


def _check(layer: MLASelfAttention, comm: GroupCommunication) -> None:
    parallel = isinstance(layer.comm, GroupCommunication) or isinstance(layer, FSDPModule)
    if parallel or any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
        raise ValueError(
            f"module: given one whose attention layer {layer.layer_number} is parallelized already, allowed is once"
        )
    comm.heads_of_rank(layer.config.num_attention_heads)
    for name, part in layer.named_modules():
        if any(True for _ in part.parameters(recurse=False)) and not isinstance(part, LocalParameters):
            raise ValueError(
                f"module: given one whose {name} is a {type(part).__name__}, allowed are layers with backend='torch'"
            )


def _take_first_ranks_parameters(layer: nn.Module, group: ProcessGroup | None) -> None:
    if group is None or group.size() == 1:
        return
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.is_meta:
                dist.broadcast(parameter.detach(), group_src=0, group=group)


def _shard_heads(layer: MLASelfAttention, mesh: DeviceMesh) -> None:
    for name, dim in HEAD_DIMS.items():
        part = getattr(layer, name, None)
        if part is not None:
            weight = part.weight
            sharded = distribute_tensor(weight.detach(), mesh, [Shard(dim)], src_data_rank=None)
            part.weight = nn.Parameter(sharded, requires_grad=weight.requires_grad)


def _fully_shard(layer: MLASelfAttention, mesh: DeviceMesh) -> None:
    fully_shard(layer, mesh=mesh)
    register_fsdp_forward_method(layer, "get_query_key_value_tensors")
    projection = layer.linear_proj
    if projection.bias is not None:
        sum_gradient = projection.sum_bias_gradient
        projection.sum_bias_gradient = _Copied(sum_gradient)


class _Copied:
    """The bias that the layer returns, in memory that outlives FSDP's gathered parameters."""

    def __init__(self, sum_gradient: Callable[[Tensor], Tensor]) -> None:
        self.sum_gradient = sum_gradient

    def __call__(self, bias: Tensor) -> Tensor:
        return self.sum_gradient(bias.clone())
