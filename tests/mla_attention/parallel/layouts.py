"""One rank's layer against its share of the same layer in parallel: output, input gradient, every gradient."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mla_attention import MLASelfAttention, PackedSeqParams, parallelize, shard_sequence_for_cp
from mla_attention.configs import MLAConfig

# Two sequences of 9 and 4 tokens with room for 16 and 8 rows, an empty one, and 8 rows past the last: 32 in all.
OFFSETS, PADDED, PACKED_ROWS = [0, 9, 13, 13], [0, 16, 24, 24], 32


def packed() -> PackedSeqParams:
    """Sequences with padding, an empty one, and rows that belong to none."""
    return PackedSeqParams(OFFSETS, cu_seqlens_q_padded=PADDED)


@dataclass(frozen=True)
class Layout:
    """How many ranks of each kind."""

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    def mesh(self) -> DeviceMesh:
        """A mesh with the dims that this layout has."""
        dims = {name: size for name, size in (("cp", self.cp), ("tp", self.tp)) if size > 1}
        return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))

    def ranks(self, mesh: DeviceMesh) -> tuple[int, int]:
        """This rank's tensor-parallel and context-parallel rank."""
        tp, cp = (mesh.get_local_rank(d) if d in (mesh.mesh_dim_names or ()) else 0 for d in ("tp", "cp"))
        return tp, cp

    def cut(self, t: Tensor, mesh: DeviceMesh, pack: PackedSeqParams | None) -> Tensor:
        """This rank's rows of hidden states."""
        tp, cp = self.ranks(mesh)
        t = shard_sequence_for_cp(t, cp, self.cp, packed_seq_params=pack)
        return t.chunk(self.tp)[tp] if self.sequence_parallel else t


def build(config: MLAConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> MLASelfAttention:
    """A layer whose norms are not 1 and whose biases are not 0, the same on every rank."""
    torch.manual_seed(seed)
    layer = MLASelfAttention(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.mul_(4.0 if "indexer" in name else 2.0)
    return layer


def full(t: Tensor) -> Tensor:
    """A DTensor's whole value, or the tensor."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Largest difference, relative to the largest expected value."""
    assert found.shape == expected.shape, f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}"
    largest = expected.abs().max().clamp(min=1e-30) if expected.numel() else torch.ones(())
    error = ((found - expected).abs().max() / largest).item() if expected.numel() else 0.0
    assert error <= tolerance, f"{what}: off by {error:.2e}, allowed are {tolerance:.0e}"


def assert_gradients(layer: nn.Module, reference: nn.Module, tolerance: float, k_pe_width: int) -> None:
    """Every parameter's gradient, and of the kv down projection's the rotary rows apart."""
    wanted = dict(reference.named_parameters())
    assert [name for name, _ in layer.named_parameters()] == list(wanted)
    for name, parameter in layer.named_parameters():
        expected = wanted[name].grad
        if expected is None or not expected.abs().max() > 0:
            assert parameter.grad is None or not full(parameter.grad).any(), name
            continue
        found = full(parameter.grad)
        assert_close(found, expected, tolerance, f"gradient of {name}")
        if name == "linear_kv_down_proj.weight":
            rows = slice(-k_pe_width, None)
            assert_close(found[rows], expected[rows], tolerance, "gradient of the rotary rows")


def step(layer: MLASelfAttention, hidden: Tensor, gradient: Tensor, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """Output, input gradient and aux of a forward and a backward; a returned indexer loss is added to the objective."""
    leaf = hidden.detach().clone().requires_grad_()
    output, bias, *rest = layer(leaf, **options)
    objective = (output * gradient).sum()
    if bias is not None:
        objective = objective + (bias * gradient).sum()
    if rest and rest[0].indexer_loss is not None:
        objective = objective + rest[0].indexer_loss
    objective.backward()
    assert leaf.grad is not None
    return output.detach(), leaf.grad, rest[0] if rest else None


def compare(
    layout: Layout,
    config: MLAConfig,
    *,
    pack: PackedSeqParams | None = None,
    rows: int = 16,
    batch: int = 2,
    tolerance: float = 1e-9,
    dtype: torch.dtype = torch.float64,
    change: Any = None,
    options: dict[str, Any] | None = None,
    local_options: Any = None,
) -> tuple[MLASelfAttention, Any, Any]:
    """Hold a layer spread by `layout` to the layer of one rank.

    Args:
        change: applied to the parallel layer before the step.
        options: of the forward. local_options: from (layout, mesh) to the parallel forward's, where these differ.

    Returns:
        The parallel layer, and aux of both.
    """
    reference = build(config, dtype)
    layer = copy.deepcopy(reference)
    mesh = layout.mesh()
    parallelize(layer, mesh, sequence_parallel=layout.sequence_parallel)
    if change is not None:
        layer = change(layer)
    torch.manual_seed(1)
    shape = (PACKED_ROWS, 1, config.hidden_size) if pack is not None else (rows, batch, config.hidden_size)
    hidden, gradient = (torch.randn(shape, dtype=dtype) for _ in range(2))
    options = {"packed_seq_params": pack, **(options or {})}
    output, hidden_grad, aux = step(reference, hidden, gradient, **options)
    local = options if local_options is None else {**options, **local_options(layout, mesh)}
    own, own_grad, own_aux = step(layer, layout.cut(hidden, mesh, pack), layout.cut(gradient, mesh, pack), **local)
    assert_close(own, layout.cut(output, mesh, pack), tolerance, "output")
    assert_close(own_grad, layout.cut(hidden_grad, mesh, pack), tolerance, "input gradient")
    assert_gradients(layer, reference, tolerance, config.qk_pos_emb_head_dim)
    if aux is not None and aux.topk_indices is not None:
        _, cp = layout.ranks(mesh)
        wanted = shard_sequence_for_cp(aux.topk_indices, cp, layout.cp, dim=1, packed_seq_params=pack)
        assert torch.equal(own_aux.topk_indices, wanted)
    if aux is not None and aux.indexer_loss is not None:
        assert aux.indexer_loss > 0
        assert_close(own_aux.indexer_loss, aux.indexer_loss, tolerance, "indexer loss")
    return layer, own_aux, aux


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group
