"""How train_step.py spreads over ranks: data x context x tensor parallel, from outside the model.

    mesh [dp, cp, tp];  a rank of (cp, tp) sees its zigzag shard of the sequence, and under sequence parallelism its
    contiguous slice of that; a rank of dp sees its own batches

`mla_attention.parallelize` shards the attention layers. The other layers work token by token and stay whole on every
rank; their gradients are summed over the ranks that share a sequence. Started without torchrun, everything here is the
identity.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from byte_text import Batch

COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Ranks:
    """Where this process stands; sizes 1 and no mesh when there is one process."""

    mesh: DeviceMesh | None = None
    dp: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    fsdp: bool = False

    @property
    def is_first(self) -> bool:
        return self.mesh is None or dist.get_rank() == 0

    def rank(self, dim: str) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(dim)

    @property
    def sequence_dims(self) -> tuple[str, ...]:
        """Mesh dims whose ranks hold different tokens of one sequence."""
        dims = (("cp", self.cp > 1), ("tp", self.sequence_parallel))
        return tuple(dim for dim, split in dims if split)

    def local_part(self, batch: Batch) -> Batch:
        """This rank's tokens of a batch; the packed offsets stay those of the whole."""

        def cut(t: Tensor) -> Tensor:
            if self.cp > 1:
                from mla_attention import shard_sequence_for_cp

                t = shard_sequence_for_cp(t, self.rank("cp"), self.cp, packed_seq_params=batch.packed)
            return t.chunk(self.tp)[self.rank("tp")].contiguous() if self.sequence_parallel else t

        return Batch(cut(batch.inputs), cut(batch.targets), batch.packed)

    def sum_over_sequence(self, value: Tensor) -> Tensor:
        """Sum of each rank's share of one sequence's value."""
        value = value.detach().clone()
        for dim in self.sequence_dims:
            dist.all_reduce(value, group=self.mesh.get_group(dim))
        return value

    def mean_over_data(self, value: Tensor) -> Tensor:
        """Mean over the ranks that hold different batches."""
        value = value.detach().clone()
        if self.dp > 1:
            dist.all_reduce(value, group=self.mesh.get_group("dp"))
        return value / self.dp

    def reduce_gradients(self, model: nn.Module) -> None:
        """Complete every gradient: token-wise layers over the sequence's ranks, all layers over dp unless FSDP does."""
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if ".attention." not in name:
                for dim in self.sequence_dims:
                    dist.all_reduce(gradient, group=self.mesh.get_group(dim))
            if self.dp > 1 and not self.fsdp:
                dist.all_reduce(gradient, group=self.mesh.get_group("dp"))
                gradient.div_(self.dp)


def start_ranks(device: torch.device, *, tp: int, cp: int, sequence_parallel: bool, fsdp: bool) -> Ranks:
    """Join the process group that torchrun announced and lay the mesh over it.

    Raises:
        ValueError: if the sizes do not fit the number of processes.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if sequence_parallel and tp == 1:
        raise ValueError("--sequence-parallel: given with --tp 1, allowed is --tp 2 or more")
    if world % (tp * cp) != 0:
        raise ValueError(
            f"--tp {tp} --cp {cp}: {world} process(es) started, allowed is a multiple of {tp * cp} "
            "(torchrun --nproc-per-node)"
        )
    if "WORLD_SIZE" not in os.environ:
        if fsdp:
            raise ValueError("--fsdp: given to a single process, allowed under torchrun")
        return Ranks()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    dp = world // (tp * cp)
    mesh = init_device_mesh(device.type, (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    return Ranks(mesh, dp=dp, cp=cp, tp=tp, sequence_parallel=sequence_parallel, fsdp=fsdp)


def parallelize_model(model: nn.Module, ranks: Ranks) -> None:
    """Shard the attention layers over the mesh; with FSDP shard all parameters over dp, block by block."""
    if ranks.mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    from mla_attention import parallelize

    attention_mesh = ranks.mesh if ranks.fsdp else ranks.mesh["cp", "tp"]
    for block in model.blocks:
        parallelize(block.attention, attention_mesh, sequence_parallel=ranks.sequence_parallel)
    if ranks.fsdp:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ranks.mesh["dp"])
