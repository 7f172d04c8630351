"""What a caller may do with a parallel layer: checkpointing, positions, given indices, copies, pickles, groups."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mla_attention import (
    MLASelfAttention,
    PackedSeqParams,
    gather_sequence_from_cp,
    parallelize,
    shard_sequence_for_cp,
)
from mla_attention.checkpoint import load_hf_state_dict, to_hf_state_dict
from mla_attention.configs import MLAConfig, tiny
from tests.mla_attention.parallel.cases_dense import LAYOUTS
from tests.mla_attention.parallel.cases_sparse import DSA
from tests.mla_attention.parallel.layouts import (
    PACKED_ROWS,
    Layout,
    assert_close,
    assert_gradients,
    build,
    compare,
    full,
    packed,
    step,
    world_group,
)
from tests.mla_attention.parallel.ranks import case

TWO = LAYOUTS[2]
SPARSE = tiny(**DSA, dsa_indexer_use_sparse_loss=True)


class Checkpointed(nn.Module):
    """A layer under activation checkpointing."""

    def __init__(self, layer: MLASelfAttention, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant

    def named_parameters(self, *args, **kwargs):
        return self.layer.named_parameters(*args, **kwargs)

    def forward(self, hidden: Tensor, **options):
        return checkpoint(lambda h: self.layer(h, **options), hidden, use_reentrant=self.use_reentrant)


def positions_of(layout: Layout, mesh, positions: Tensor, pack: PackedSeqParams | None) -> Tensor:
    """A rank's part of position ids `[S]` or `[B, S]`."""
    tp, cp = layout.ranks(mesh)
    part = shard_sequence_for_cp(positions, cp, layout.cp, dim=-1, packed_seq_params=pack)
    return part.chunk(layout.tp, -1)[tp] if layout.sequence_parallel else part


for layout_name, layout in TWO.items():

    @case(2, f"checkpoint/{layout_name}")
    def non_reentrant(layout: Layout = layout) -> None:
        compare(layout, tiny(), change=lambda layer: Checkpointed(layer, False))
        compare(layout, SPARSE, change=lambda layer: Checkpointed(layer, False))

    @case(2, f"positions/{layout_name}")
    def positions(layout: Layout = layout) -> None:
        torch.manual_seed(3)
        each = torch.randint(0, 50, (16,))
        by_batch = torch.randint(0, 3000, (2, 16))  # past the smallest table
        in_pack = torch.randint(0, 50, (PACKED_ROWS,))
        for given, pack in ((each, None), (by_batch, None), (in_pack, packed())):
            for config in (tiny(), tiny(kv_assembly="gemm"), SPARSE):

                def own(layout: Layout, mesh, given: Tensor = given, pack: PackedSeqParams | None = pack) -> dict:
                    return {"position_ids": positions_of(layout, mesh, given, pack)}

                compare(layout, config, pack=pack, options={"position_ids": given}, local_options=own)

    @case(2, f"given_indices/{layout_name}")
    def given_indices(layout: Layout = layout) -> None:
        config = tiny(**DSA, dsa_indexer_shared=True)
        for pack, shape in ((None, (2, 16, 5)), (packed(), (1, PACKED_ROWS, 5))):
            torch.manual_seed(4)
            keys = torch.rand(shape[0], shape[1], shape[1]).argsort(-1)[..., : shape[2]]
            keys[:, ::3, 1] = -1

            def own(layout: Layout, mesh, keys: Tensor = keys, pack: PackedSeqParams | None = pack) -> dict:
                _, cp = layout.ranks(mesh)
                return {"topk_indices": shard_sequence_for_cp(keys, cp, layout.cp, dim=1, packed_seq_params=pack)}

            options = {"topk_indices": keys, "return_aux": True}
            compare(layout, config, pack=pack, options=options, local_options=own)

    @case(2, f"largest_logits/{layout_name}")
    def largest_logits(layout: Layout = layout) -> None:
        for pack in (None, packed()):
            layer, own, aux = compare(layout, tiny(qk_clip=True), pack=pack, options={"return_aux": True})
            heads = aux.max_attention_logits.chunk(layout.tp)[layer.comm.tp_rank]
            assert_close(own.max_attention_logits, heads, 1e-9, "largest logits")
            threshold = aux.max_attention_logits.median().item()
            layer.clip_qk(own.max_attention_logits, threshold)
            reference = build(tiny(qk_clip=True))
            reference.clip_qk(aux.max_attention_logits, threshold)
            for (name, parameter), wanted in zip(layer.named_parameters(), reference.parameters(), strict=True):
                assert_close(full(parameter.detach()), wanted.detach(), 1e-9, name)

    @case(2, f"copies/{layout_name}")
    def copies(layout: Layout = layout) -> None:
        for config in (tiny(recompute_up_proj=True), SPARSE):
            compare(layout, config, change=copy.deepcopy)
            compare(layout, config, change=lambda layer: pickle.loads(pickle.dumps(layer)))

    @case(2, f"tensors/{layout_name}")
    def tensors(layout: Layout = layout) -> None:
        """Query and value by the rank's heads and rows, keys of all ranks."""
        for config in (tiny(), SPARSE):
            whole = build(config)
            mesh = layout.mesh()
            layer = parallelize(copy.deepcopy(whole), mesh, sequence_parallel=layout.sequence_parallel)
            hidden = torch.randn(
                16, 2, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
            )
            found = layer.get_query_key_value_tensors(layout.cut(hidden, mesh, None))
            wanted = whole.get_query_key_value_tensors(hidden)
            tp, cp = layout.ranks(mesh)
            for i, (f, w) in enumerate(zip(found, wanted, strict=True)):
                if w is None:
                    assert f is None
                    continue
                if w.dim() == 4 and w.shape[2] > 1:
                    w = w.chunk(layout.tp, 2)[tp]
                w = w if i in (1, 2) else shard_sequence_for_cp(w, cp, layout.cp)
                assert_close(f.detach(), w.detach(), 1e-12, f"tensor {i}")


@case(2, "checkpoint/reentrant")
def reentrant() -> None:
    for layout in TWO.values():
        compare(layout, tiny(), change=lambda layer: Checkpointed(layer, True))


def from_groups(config: MLAConfig, tp_group, cp_group) -> tuple[MLASelfAttention, MLASelfAttention]:
    whole = build(config)
    layer = MLASelfAttention(config, tp_group=tp_group, cp_group=cp_group, dtype=torch.float64)
    load_hf_state_dict(layer, to_hf_state_dict(whole))
    return whole, layer


@case(2, "groups")
def groups() -> None:
    """A layer built with process groups is the local module that parallelize makes, on plain tensors."""
    for config in (tiny(add_bias_linear=True), tiny(q_lora_rank=None), SPARSE):
        for tp_group, cp_group in ((world_group(), None), (None, world_group())):
            whole, layer = from_groups(config, tp_group, cp_group)
            layout = Layout(tp=2 if tp_group else 1, cp=2 if cp_group else 1)
            mesh = layout.mesh()
            hidden, gradient = (torch.randn(2, 16, 2, config.hidden_size, dtype=torch.float64)).unbind(0)
            for t in (hidden, gradient):
                dist.broadcast(t, 0)
            output, hidden_grad, _ = step(whole, hidden, gradient)
            own, own_grad, _ = step(layer, layout.cut(hidden, mesh, None), layout.cut(gradient, mesh, None))
            assert_close(own, layout.cut(output, mesh, None), 1e-9, "output")
            assert_close(own_grad, layout.cut(hidden_grad, mesh, None), 1e-9, "input gradient")
            twin = parallelize(copy.deepcopy(whole), mesh)
            step(twin, layout.cut(hidden, mesh, None), layout.cut(gradient, mesh, None))
            for (name, found), wanted in zip(layer.named_parameters(), twin.parameters(), strict=True):
                local = wanted.grad.to_local() if hasattr(wanted.grad, "to_local") else wanted.grad
                assert_close(found.grad, local, 1e-9, name)


@case(2, "groups_draw_the_whole_layers_weights")
def drawn() -> None:
    for config in (tiny(add_bias_linear=True), tiny(q_lora_rank=None), SPARSE):
        torch.manual_seed(5)
        whole = MLASelfAttention(config)
        torch.manual_seed(5)
        layer = MLASelfAttention(config, tp_group=world_group())
        expected = parallelize(whole, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        for (name, found), wanted in zip(layer.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(found, wanted.to_local() if hasattr(wanted, "to_local") else wanted), name


@case(2, "first_ranks_parameters_are_kept")
def first_rank() -> None:
    torch.manual_seed(dist.get_rank())
    layer = MLASelfAttention(tiny())
    kept = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    for value in kept.values():
        dist.broadcast(value, 0)
    parallelize(layer, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    for name, parameter in layer.named_parameters():
        assert torch.equal(full(parameter.detach()), kept[name]), name


@case(2, "every_layer_of_a_model")
def model() -> None:
    whole = nn.Sequential(*(build(tiny(), seed=seed) for seed in range(2)))
    spread = parallelize(copy.deepcopy(whole), Layout(tp=2).mesh(), sequence_parallel=True)
    hidden = torch.randn(8, 1, tiny().hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = whole[1](whole[0](hidden)[0])[0]
    expected.square().sum().backward()
    part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    output = spread[1](spread[0](hidden[part])[0])[0]
    output.square().sum().backward()
    assert_close(output.detach(), expected[part].detach(), 1e-9, "output")
    assert_gradients(spread, whole, 1e-9, tiny().qk_pos_emb_head_dim)


@case(2, "meta")
def meta() -> None:
    """Built and parallelized without memory, then filled."""
    for tp_group in (None, world_group()):
        with torch.device("meta"):
            layer = MLASelfAttention(tiny(), tp_group=tp_group, dtype=torch.float64)
        if tp_group is None:
            parallelize(layer, Layout(tp=2).mesh())
        layer.to_empty(device="cpu")
        whole = build(tiny())
        load_hf_state_dict(layer, to_hf_state_dict(whole))
        hidden = torch.randn(6, 1, tiny().hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert_close(layer(hidden)[0].detach(), whole(hidden)[0].detach(), 1e-9, "output")


@case(4, "shards_and_back")
def shards_and_back() -> None:
    rank = dist.get_rank()
    for pack, rows in ((None, 16), (PackedSeqParams([0, 8, 8, 24]), 28)):
        for dim in (0, 1, -1):
            shape = [3, 3, 3]
            shape[dim] = rows
            t = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
            part = shard_sequence_for_cp(t, rank, 4, dim=dim, packed_seq_params=pack)
            back = gather_sequence_from_cp(part, world_group(), dim=dim, packed_seq_params=pack)
            assert torch.equal(back, t)
            weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            (gradient,) = torch.autograd.grad((back * weight).sum(), t)
            mine = torch.zeros(rows, dtype=torch.bool)
            mine[shard_sequence_for_cp(torch.arange(rows), rank, 4, packed_seq_params=pack)] = True
            expected = (weight.movedim(dim, -1) * mine).movedim(-1, dim)
            assert torch.equal(gradient, expected)
