"""The one table of parameter names, and the way between full checkpoint tensors and a module's (local) parameters.

Row orders and interleaved rotary pairs are the same in Megatron and Hugging Face checkpoints: every entry is a copy
under another name. Under tensor parallelism an entry is cut along `tp_dim` of its weight.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mla_attention.argument_checks import check_kind
from mla_attention.attention import MLASelfAttention
from mla_attention.checkpoint.files import Box, LazyTensor, whole


class Entry(NamedTuple):
    """One submodule with weights: its name here (Megatron's), its name in Hugging Face, the dimension that TP cuts."""

    ours: str
    hf: str
    tp_dim: int | None


TABLE = (
    Entry("linear_q_proj", "q_proj", 0),
    Entry("linear_q_down_proj", "q_a_proj", None),
    Entry("q_layernorm", "q_a_layernorm", None),
    Entry("linear_q_up_proj", "q_b_proj", 0),
    Entry("linear_kv_down_proj", "kv_a_proj_with_mqa", None),
    Entry("kv_layernorm", "kv_a_layernorm", None),
    Entry("linear_kv_up_proj", "kv_b_proj", 0),
    Entry("linear_proj", "o_proj", 1),
    Entry("core_attention.indexer.linear_wq_b", "indexer.wq_b", None),
    Entry("core_attention.indexer.linear_wk", "indexer.wk", None),
    Entry("core_attention.indexer.k_norm", "indexer.k_norm", None),
    Entry("core_attention.indexer.linear_weights_proj", "indexer.weights_proj", None),
)
BY_OURS = {entry.ours: entry for entry in TABLE}
BY_HF = {entry.hf: entry for entry in TABLE}

# A norm that Transformer Engine fuses into the projection behind it is named after that projection.
FUSED_NORMS = {
    "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
    "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
}
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Unusable:
    """Stands for a tensor whose fault is already reported, so that it is not reported as missing too."""

    shape: tuple[int, ...] = ()
    dtype = torch.float32

    def read(self, box: Box) -> Tensor:
        """Never reached: a reported fault stops the load before anything is read."""
        raise RuntimeError(f"a tensor reported as unusable must not be read, box {box}")


@dataclass(frozen=True)
class Slot:
    """A parameter of the module and its place in the full tensor."""

    name: str  # canonical: fused norms under their unfused name
    parameter: nn.Parameter
    tp_dim: int | None  # dimension cut by a tensor-parallel group whose ranks hold plain local tensors
    shape: tuple[int, ...]  # of the full tensor
    box: Box  # this rank's part of the full tensor

    def local(self) -> Tensor:
        """Return this rank's storage, to be written in place."""
        data = self.parameter.detach()
        return data.to_local() if isinstance(data, DTensor) else data


@dataclass
class Problems:
    """What is wrong with a checkpoint, collected so that one error names everything."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def raise_if_any(self, module: MLASelfAttention) -> None:
        """Raise one ValueError that names every key at fault (the first eight of a kind, then a count)."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "misshapen": self.misshapen}
        parts = [f"{kind}: {_listed(keys)}" for kind, keys in kinds.items() if keys] + self.other
        if parts:
            raise ValueError(f"tensors do not fit {type(module).__name__}, nothing was loaded; {'; '.join(parts)}")


def find_slots(module: MLASelfAttention) -> list[Slot]:
    """Return the module's parameters with their places in the full tensors.

    Raises:
        ValueError: a module that is no `MLASelfAttention`, or a parameter that no checkpoint entry describes.
    """
    check_kind("module", module, MLASelfAttention, required=True)
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()  # parameters left gathered by a forward are copies; writing them would be lost
    tp_rank, tp_size = module.comm.tp_rank, module.comm.tp_size
    slots = []
    for name, parameter in module.named_parameters():
        canonical = FUSED_NORMS.get(name, name)
        entry = BY_OURS.get(canonical.rpartition(".")[0])
        if entry is None:
            raise ValueError(f"{type(module).__name__} has the parameter {name}, which no checkpoint entry describes")
        tp_dim = None if entry.tp_dim is None or entry.tp_dim >= parameter.ndim else entry.tp_dim
        shape, box = tuple(parameter.shape), whole(tuple(parameter.shape))
        if isinstance(parameter, DTensor):
            tp_dim = None
            chunk = parameter.__create_chunk_list__()[0]
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        elif tp_size == 1:
            tp_dim = None
        elif tp_dim is not None:
            size = shape[tp_dim]
            shape = tuple(n * tp_size if dim == tp_dim else n for dim, n in enumerate(shape))
            cut = slice(tp_rank * size, (tp_rank + 1) * size)
            box = tuple(cut if dim == tp_dim else side for dim, side in enumerate(box))
        slots.append(Slot(canonical, parameter, tp_dim, shape, box))
    return slots


def load_full_tensors(
    module: MLASelfAttention,
    tensors: dict[str, LazyTensor],
    problems: Problems,
    *,
    spell: Callable[[str], str],
) -> None:
    """Check full tensors against the module, then write this rank's part of each.

    Everything is checked, then everything is read, then written: a failed load leaves the module unchanged. Values are
    rounded once, to the parameter's dtype.

    Args:
        module: The attention module.
        tensors: `{canonical name: LazyTensor}`.
        problems: What the caller has already found wrong.
        spell: From a canonical name to the checkpoint's key, for messages.

    Raises:
        ValueError: one line naming every missing, unexpected and misshapen key, or a module on the meta device.
    """
    slots = find_slots(module)
    on_meta = [slot.name for slot in slots if slot.parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"parameter {on_meta[0]} is on the meta device: call module.to_empty(device=...) before loading"
        )
    shapes = {slot.name: slot.shape for slot in slots}
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.missing.append(spell(name))
        elif isinstance(tensor, Unusable):
            continue
        elif tensor.shape != shape:
            problems.misshapen.append(f"{spell(name)} is {list(tensor.shape)}, expected {list(shape)}")
        elif tensor.dtype not in WEIGHT_DTYPES:
            allowed = ", ".join(str(dtype) for dtype in WEIGHT_DTYPES)
            problems.other.append(f"{spell(name)} has dtype {tensor.dtype}, allowed are {allowed}")
    problems.unexpected += [spell(name) for name in tensors if name not in shapes]
    problems.raise_if_any(module)

    with torch.no_grad():
        staged = [(slot.local(), tensors[slot.name].read(slot.box)) for slot in slots]
        for local, values in staged:
            local.copy_(values)


def gather_full_tensors(module: MLASelfAttention) -> dict[str, Tensor]:
    """Return `{canonical name: full tensor}`, detached; shards are gathered, on all their ranks together.

    A parameter that this rank holds whole is returned without a copy, as in `module.state_dict()`.
    """
    full = {}
    for slot in find_slots(module):
        value = slot.parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        elif slot.tp_dim is not None:
            value = _gather_shards(value, slot.tp_dim, module)
        full[slot.name] = value
    order = list(BY_OURS)
    return {name: full[name] for name in sorted(full, key=lambda name: order.index(name.rpartition(".")[0]))}


def _gather_shards(local: Tensor, dim: int, module: MLASelfAttention) -> Tensor:
    """Concatenate the plain local shards of the module's tensor-parallel group along `dim`."""
    communication: Any = module.comm
    shards = [torch.empty_like(local) for _ in range(communication.tp_size)]
    torch.distributed.all_gather(shards, local.contiguous(), group=communication.tp_group)
    return torch.cat(shards, dim=dim)


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
