"""FSDP2, distributed checkpoints between layouts, and Hugging Face weights into shards."""

import copy
import math
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mla_attention import MLASelfAttention, parallelize
from mla_attention.checkpoint import files, load_hf_state_dict, to_hf_state_dict
from mla_attention.configs import MLAConfig, tiny
from tests.mla_attention.parallel.cases_dense import LAYOUTS
from tests.mla_attention.parallel.cases_sparse import DSA
from tests.mla_attention.parallel.layouts import Layout, assert_close, assert_gradients, build, full
from tests.mla_attention.parallel.ranks import case

SPARSE = tiny(**DSA, dsa_indexer_use_sparse_loss=True)
WARM_UP = tiny(**DSA, dsa_mode="dense_warmup")


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def shared_folder() -> Path:
    """A temporary folder that all ranks know, made by the first."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(name[0])


def objective(layer: MLASelfAttention, hidden: Tensor, target: Tensor) -> Tensor:
    output, _, aux = layer(hidden, return_aux=True)
    loss = (output * target).sum()
    return loss if aux.indexer_loss is None else loss + aux.indexer_loss


def train_steps(layer: MLASelfAttention, config: MLAConfig, dp_rank: int, dp: int, steps: int = 2) -> list[float]:
    """Steps on the mean over dp batches: all of them on one rank, this rank's under FSDP."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in layer.parameters():
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds.values()], lr=0.1)
    losses = []
    for i in range(steps):
        generator = torch.Generator().manual_seed(i)
        batches, targets = torch.randn(2, 2, 8, 1, config.hidden_size, dtype=torch.float64, generator=generator)
        mine = range(2) if dp == 1 else [dp_rank]
        loss = torch.stack([objective(layer, batches[b], targets[b]) for b in mine]).mean()
        loss.backward()
        if i == 0:
            layer.first_gradients = {n: full(p.grad).clone() for n, p in layer.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if dp > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def compare_training(config: MLAConfig, mesh: DeviceMesh) -> None:
    """Loss, gradients of the first step and parameters after two equal those of one rank with both batches."""
    whole = build(config)
    layer = parallelize(copy.deepcopy(whole), mesh)
    assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())
    dp_rank = mesh.get_local_rank("dp")
    found, wanted = train_steps(layer, config, dp_rank, 2), train_steps(whole, config, 0, 1)
    for f, w in zip(found, wanted, strict=True):
        assert abs(f - w) <= 1e-9 * abs(w)
    assert whole.first_gradients.keys() == layer.first_gradients.keys()
    for name, gradient in whole.first_gradients.items():
        assert_close(layer.first_gradients[name], gradient, 1e-9, name)
    for (name, parameter), expected in zip(layer.named_parameters(), whole.parameters(), strict=True):
        assert_close(full(parameter.detach()), expected.detach(), 1e-6, name)


@case(2, "fsdp2")
def fsdp2() -> None:
    for config in (tiny(recompute_up_proj=True), SPARSE):
        compare_training(config, mesh_of(2, 1))


@case(4, "fsdp2_tp2")
def fsdp2_tp2() -> None:
    for config in (tiny(recompute_up_proj=True, mla_down_proj_fusion=True), SPARSE):
        compare_training(config, mesh_of(2, 2))


@case(2, "fsdp_indexer_loss_alone")
def warm_up() -> None:
    """A backward from aux alone gathers the parameters that it needs."""
    whole = build(WARM_UP)
    layer = parallelize(copy.deepcopy(whole), mesh_of(2, 1))
    for module in (whole, layer):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("indexer" in name)
        hidden = torch.randn(8, 1, WARM_UP.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        module(hidden, return_aux=True)[2].indexer_loss.backward()
    assert_gradients(layer, whole, 1e-9, WARM_UP.qk_pos_emb_head_dim)


@case(2, "fsdp_bias_tensors_and_clip")
def beside_forward() -> None:
    """The returned bias outlives gathered parameters; tensors and qk-clip work on shards."""
    config = tiny(add_bias_linear=True, qk_clip=True)
    whole = build(config)
    layer = parallelize(copy.deepcopy(whole), mesh_of(2, 1))
    hidden = torch.randn(8, 1, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for module in (whole, layer):
        output, bias, aux = module(hidden, return_aux=True)
        (output + bias).square().sum().backward()
    assert_gradients(layer, whole, 1e-9, config.qk_pos_emb_head_dim)
    with torch.no_grad():
        tensors = [module.get_query_key_value_tensors(hidden) for module in (layer, whole)]
    for found, wanted in zip(*tensors, strict=True):
        assert_close(found.detach(), wanted.detach(), 1e-12, "tensors")
    threshold = aux.max_attention_logits.median().item()
    for module in (whole, layer):
        module.clip_qk(aux.max_attention_logits, threshold)
    for (name, parameter), expected in zip(layer.named_parameters(), whole.parameters(), strict=True):
        assert_close(full(parameter.detach()), expected.detach(), 1e-12, name)


@case(4, "fsdp2_tp2_clip")
def clip_of_both() -> None:
    config = tiny(qk_clip=True)
    whole = build(config)
    mesh = mesh_of(2, 2)
    layer = parallelize(copy.deepcopy(whole), mesh)
    logits = torch.rand(config.num_attention_heads, generator=torch.Generator().manual_seed(0)) + 0.5
    whole.clip_qk(logits, 0.9)
    layer.clip_qk(logits.chunk(2)[mesh.get_local_rank("tp")], 0.9)
    for (name, parameter), expected in zip(layer.named_parameters(), whole.parameters(), strict=True):
        assert_close(full(parameter.detach()), expected.detach(), 1e-12, name)


@case(2, "fsdp_activation_checkpoint")
def fsdp_checkpoint() -> None:
    whole = build(tiny())
    layer = parallelize(copy.deepcopy(whole), mesh_of(2, 1))
    hidden = torch.randn(8, 1, tiny().hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for module in (whole, layer):
        output = checkpoint(module, hidden.clone().requires_grad_(), use_reentrant=False)[0]
        output.square().sum().backward()
    assert_gradients(layer, whole, 1e-9, tiny().qk_pos_emb_head_dim)


def save(layer: nn.Module, folder: Path) -> None:
    dcp.save(layer.state_dict(), checkpoint_id=str(folder / "checkpoint"))


def load(layer: nn.Module, folder: Path, **options) -> None:
    state = layer.state_dict()
    dcp.load(state, checkpoint_id=str(folder / "checkpoint"), **options)
    layer.load_state_dict(state)


@case(2, "checkpoint_from_two_ranks_to_one")
def two_to_one() -> None:
    for mesh in (mesh_of(2, 1), mesh_of(1, 2), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))):
        for config in (tiny(), SPARSE):
            folder = shared_folder()
            whole = build(config)
            save(parallelize(copy.deepcopy(whole), mesh), folder)
            alone = build(config, seed=9)
            if dist.get_rank() == 1:
                load(alone, folder, no_dist=True)
                for (name, found), wanted in zip(alone.named_parameters(), whole.parameters(), strict=True):
                    assert torch.equal(found, wanted), name


@case(4, "checkpoint_from_tp2_to_tp4_and_fsdp")
def tp2_to_tp4() -> None:
    for config in (tiny(num_attention_heads=8), SPARSE):
        folder = shared_folder()
        whole = build(config)
        save(parallelize(copy.deepcopy(whole), mesh_of(2, 2), dp_dim=None), folder)
        for mesh in (mesh_of(1, 4), mesh_of(2, 2), mesh_of(4, 1)):
            other = parallelize(build(config, seed=9), mesh)
            load(other, folder)
            for (name, found), wanted in zip(other.named_parameters(), whole.parameters(), strict=True):
                assert torch.equal(full(found.detach()), wanted), name


@case(2, "hugging_face_weights_are_read_by_slice")
def by_slice() -> None:
    folder = shared_folder()
    sizes: dict[str, int] = {}

    class Spy(files.InFile):
        def __init__(self, key, handle) -> None:
            super().__init__(key, handle)
            self.key = key

        def read(self, box):
            sizes[self.key] = sizes.get(self.key, 0) + math.prod(side.stop - side.start for side in box)
            return super().read(box)

    whole = build(SPARSE)
    if dist.get_rank() == 0:
        tensors = {key: value.clone() for key, value in to_hf_state_dict(whole).items()}
        save_file(tensors, os.path.join(folder, "model.safetensors"))
    dist.barrier()
    original, files.InFile = files.InFile, Spy
    try:
        for sequence_parallel in (False, True):
            layer = parallelize(build(SPARSE, seed=9), Layout(tp=2).mesh(), sequence_parallel=sequence_parallel)
            sizes.clear()
            load_hf_state_dict(layer, folder)
            for (name, found), wanted in zip(layer.named_parameters(), whole.parameters(), strict=True):
                assert torch.equal(full(found.detach()), wanted), name
            for key, part in {"q_b_proj": 2, "kv_b_proj": 2, "o_proj": 2, "q_a_proj": 1, "indexer.wk": 1}.items():
                assert sizes[f"{key}.weight"] * part == to_hf_state_dict(whole)[f"{key}.weight"].numel(), key
    finally:
        files.InFile = original


for world, layouts in LAYOUTS.items():

    @case(world, "weights_are_exported_whole")
    def exported(layouts: dict[str, Layout] = layouts) -> None:
        whole = build(SPARSE)
        wanted = to_hf_state_dict(whole)
        for layout in layouts.values():
            layer = parallelize(copy.deepcopy(whole), layout.mesh(), sequence_parallel=layout.sequence_parallel)
            found = to_hf_state_dict(layer)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
