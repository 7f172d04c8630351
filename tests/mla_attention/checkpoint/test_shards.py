"""A rank that holds shards asks the checkpoint for its own part only, and gets the right one."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mla_attention import MLASelfAttention
from mla_attention.checkpoint import files, load_hf_state_dict, load_megatron_state_dict, to_hf_state_dict
from mla_attention.configs import tiny
from tests.mla_attention.checkpoint.layers import CONFIGS, build, same_bits, weights_of
from tests.mla_attention.checkpoint.test_files import write_shards
from tests.mla_attention.checkpoint.test_fp8 import fp8_checkpoint
from tests.mla_attention.checkpoint.test_megatron import split_heads

# Dimension that a tensor-parallel rank holds a part of, by our name.
CUT = {"linear_q_proj.weight": 0, "linear_q_up_proj.weight": 0, "linear_kv_up_proj.weight": 0, "linear_proj.weight": 1}


@dataclass(frozen=True)
class Ranks:
    """What the checkpoint functions read of the `comm` of a module built with a tensor-parallel group."""

    tp_rank: int
    tp_size: int


def part(value: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return value.chunk(size, dim)[rank].clone()


def local_layer(config, rank: int, size: int) -> nn.Module:
    """Return the layer as a rank of a tensor-parallel group of plain local tensors holds it."""
    layer = build(config)
    for name, dim in CUT.items():
        owner, _, leaf = name.rpartition(".")
        if hasattr(layer, owner):
            projection = layer.get_submodule(owner)
            setattr(projection, leaf, nn.Parameter(part(getattr(projection, leaf).detach(), dim, rank, size)))
    layer.comm = Ranks(rank, size)
    return layer


@pytest.fixture
def read_sizes(monkeypatch) -> dict[str, int]:
    """Elements read of each key of a file."""
    sizes: dict[str, int] = {}

    class Spy(files.InFile):
        def __init__(self, key, handle) -> None:
            super().__init__(key, handle)
            self.key = key

        def read(self, box):
            sizes[self.key] = sizes.get(self.key, 0) + math.prod(side.stop - side.start for side in box)
            return super().read(box)

    monkeypatch.setattr(files, "InFile", Spy)
    return sizes


@pytest.fixture
def fake_world():
    """Start a process group that sends nothing, as a given rank of a world."""

    def start(rank: int, world: int) -> None:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("size", [2, 4])
def test_plain_local_shards_take_their_slice(config, size) -> None:
    whole = build(config)
    tensors = to_hf_state_dict(whole)
    for rank in range(size):
        layer = local_layer(config, rank, size)
        load_hf_state_dict(layer, tensors)
        for name, value in whole.state_dict().items():
            expected = part(value, CUT[name], rank, size) if name in CUT else value
            assert torch.equal(layer.state_dict()[name], expected), name


def test_fp8_slices_that_start_inside_a_tile(tmp_path, read_sizes) -> None:
    config = tiny(num_attention_heads=12, qk_head_dim=64, v_head_dim=40)  # 3 heads a rank: 240 + 312 rows, 120 columns
    tensors, values = fp8_checkpoint(build(config))
    write_shards(tmp_path, tensors, shards=3, index=True)
    for rank in range(4):
        layer = local_layer(config, rank, 4)
        read_sizes.clear()
        load_hf_state_dict(layer, tmp_path)
        wanted = build(config)
        load_hf_state_dict(wanted, values)
        for name, value in wanted.state_dict().items():
            expected = part(value, CUT[name], rank, 4) if name in CUT else value
            assert torch.equal(layer.state_dict()[name], expected), name
        for key, cut in {"q_b_proj.weight": 4, "kv_b_proj.weight": 4, "o_proj.weight": 4, "q_a_proj.weight": 1}.items():
            assert read_sizes[key] == tensors[key].numel() // cut
        tiles = tensors["o_proj.weight_scale_inv"].shape
        assert read_sizes["o_proj.weight_scale_inv"] <= 2 * tiles[0] < tiles[0] * tiles[1]


def test_a_whole_layer_reads_every_element_once(tmp_path, read_sizes) -> None:
    tensors, _ = fp8_checkpoint(build(tiny()))
    write_shards(tmp_path, tensors, shards=2, index=False)
    load_hf_state_dict(build(tiny()), tmp_path)
    assert read_sizes == {key: value.numel() for key, value in tensors.items()}


def test_split_megatron_heads_are_read_by_slice() -> None:
    config = tiny()
    whole = build(config)
    tensors = whole.state_dict()
    up = tensors.pop("linear_kv_up_proj.weight")
    key, value = split_heads(up, config.num_attention_heads, config.qk_head_dim)
    tensors |= {"linear_k_up_proj.weight": key, "linear_v_up_proj.weight": value}
    for rank in range(2):
        layer = local_layer(config, rank, 2)
        load_megatron_state_dict(layer, tensors)
        assert torch.equal(layer.linear_kv_up_proj.weight, part(up, 0, rank, 2))


def test_a_checkpoint_of_another_head_count_names_full_shapes() -> None:
    layer = local_layer(tiny(), 1, 2)
    before = weights_of(layer)
    rows, columns = to_hf_state_dict(build(tiny()))["q_b_proj.weight"].shape
    with pytest.raises(ValueError, match=rf"q_b_proj\.weight is \[{2 * rows}, {columns}\], expected \[{rows}, "):
        load_hf_state_dict(layer, to_hf_state_dict(build(tiny(num_attention_heads=2 * tiny().num_attention_heads))))
    assert same_bits(before, weights_of(layer))


def distribute(layer: nn.Module, mesh) -> None:
    """Turn the layer's parameters into DTensors, up projections cut by rows, the output projection by columns."""
    for name, parameter in list(layer.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        placement = Shard(CUT[name]) if name in CUT else Replicate()
        sharded = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(sharded))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("dims", [(1, 4), (2, 2), (4, 1)], ids=["tp4", "fsdp2 tp2", "fsdp4"])
def test_dtensors_take_their_slice(tmp_path, read_sizes, fake_world, rank, dims) -> None:
    config = tiny()
    whole = build(config)
    write_shards(tmp_path, to_hf_state_dict(whole), shards=2, index=True)
    fake_world(rank, 4)
    dp, tp = f"dp{rank}", f"tp{rank}"  # torch caches shard offsets by mesh; the same names would give rank 0's to all
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=(dp, tp))
    layer, expected = build(config), copy.deepcopy(whole)
    for module in (layer, expected):
        distribute(module, mesh[tp])
        if dims[0] > 1:
            fully_shard(module, mesh=mesh[dp])  # cuts every local part again, along dimension 0
    load_hf_state_dict(layer, tmp_path)
    for (name, parameter), wanted in zip(layer.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.to_local(), wanted.to_local()), name
    up = whole.linear_kv_up_proj.weight
    assert read_sizes["kv_b_proj.weight"] == up.numel() // 4


def test_shards_without_rows_read_nothing(tmp_path, read_sizes, fake_world) -> None:
    """The fourth of four ranks holds no row of a 3-row weight."""
    config = CONFIGS["dsa"]
    whole = build(config)
    write_shards(tmp_path, to_hf_state_dict(whole), shards=1, index=False)
    fake_world(3, 4)
    layer = build(config)
    fully_shard(layer, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("last of four",)))
    load_hf_state_dict(layer, tmp_path)
    assert layer.core_attention.indexer.linear_weights_proj.weight.to_local().numel() == 0
    assert not read_sizes.get("indexer.weights_proj.weight")
    assert torch.equal(layer.linear_proj.weight.to_local(), whole.linear_proj.weight.chunk(4)[3])


def test_a_failed_load_leaves_shards_unchanged(fake_world) -> None:
    fake_world(1, 2)
    layer = build(tiny())
    distribute(layer, init_device_mesh("cpu", (2,), mesh_dim_names=("last of two",)))
    before = {name: parameter.to_local().clone() for name, parameter in layer.named_parameters()}
    tensors = to_hf_state_dict(build(tiny()))
    tensors["o_proj.weight"] = tensors["o_proj.weight"][:, 1:]
    with pytest.raises(ValueError, match=r"misshapen: o_proj\.weight is \[64, "):
        load_hf_state_dict(layer, tensors)
    assert all(torch.equal(before[name], parameter.to_local()) for name, parameter in layer.named_parameters())


def test_parameters_left_gathered_by_fsdp_are_sharded_again_before_writing(fake_world) -> None:
    fake_world(0, 2)
    layer, whole = build(tiny()), build(tiny())
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("first of two",)))
    layer.unshard()
    load_hf_state_dict(layer, to_hf_state_dict(whole))
    assert torch.equal(layer.linear_proj.weight.to_local(), whole.linear_proj.weight.chunk(2)[0])


def gather_on_rank(rank: int, folder: str) -> None:
    """Export from plain local shards and from DTensors on a real group of two; both must give the full tensors back."""
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tensors = torch.load(f"{folder}/tensors.pt")
    local = MLASelfAttention(tiny(), tp_group=torch.distributed.group.WORLD)
    distributed = build(tiny())
    mesh = init_device_mesh("cpu", (2,))
    distribute(distributed, mesh)
    as_dtensors = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in tensors.items()}
    for layer, given in ((local, tensors), (distributed, tensors), (build(tiny()), as_dtensors)):
        load_hf_state_dict(layer, given)
        assert same_bits(to_hf_state_dict(layer), tensors)
    torch.distributed.destroy_process_group()


def test_shards_are_gathered_for_export(tmp_path) -> None:
    torch.save(to_hf_state_dict(build(tiny())), tmp_path / "tensors.pt")
    torch.multiprocessing.spawn(gather_on_rank, (str(tmp_path),), nprocs=2)
