"""Layers on Transformer Engine's modules (a stand-in for them) in parallel, held to one rank's torch layer.

Whether modules or core attention are Transformer Engine's: the second exchanges keys and values between ranks itself.
Its linear layers read their weight through a method that the layers here override, and the norms that they apply
themselves see a rank's own heads only: both have to hand the ranks' gradients on.
"""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mla_attention import MLASelfAttention, PackedSeqParams, parallelize
from mla_attention.configs import MLAConfig, tiny
from mla_attention.configs.validation import CP_COMM_TYPES
from mla_attention.core_attention.te import TEAttention
from mla_attention.parallel import collectives
from tests.mla_attention.checkpoint.layers import DSA
from tests.mla_attention.layers import fake_transformer_engine as fake
from tests.mla_attention.parallel.cases_dense import CONFIGS, LAYOUTS
from tests.mla_attention.parallel.cases_refusals import hidden, refused
from tests.mla_attention.parallel.layouts import (
    Layout,
    assert_close,
    assert_gradients,
    build,
    packed,
    step,
    world_group,
)
from tests.mla_attention.parallel.ranks import case

CASES = {"plain": CONFIGS["plain"], "recompute": CONFIGS["recompute"], "bias": CONFIGS["bias"]}
CASES["dsa"] = MLAConfig(**{**vars(CONFIGS["plain"]), **DSA})


def te_layer_equals_one_rank(layout: Layout, config: MLAConfig, packing: bool) -> None:
    """Output, input gradient and every parameter's gradient."""
    reference = build(config)
    mesh = layout.mesh()
    pack = packed() if packing else None
    with pytest.MonkeyPatch.context() as patch:
        fake.install(patch)
        layer = MLASelfAttention(config, backend="te", dtype=torch.float64)
        layer.load_state_dict(reference.state_dict())
        parallelize(layer, mesh, sequence_parallel=layout.sequence_parallel)
        torch.manual_seed(1)
        hidden, gradient = (torch.randn(32, 1, config.hidden_size, dtype=torch.float64) for _ in range(2))
        output, hidden_gradient, _ = step(reference, hidden, gradient, packed_seq_params=pack)
        own = [layout.cut(t, mesh, pack) for t in (hidden, gradient)]
        found, found_gradient, _ = step(layer, *own, packed_seq_params=pack)
    assert_close(found, layout.cut(output, mesh, pack), 1e-9, "output")
    assert_close(found_gradient, layout.cut(hidden_gradient, mesh, pack), 1e-9, "input gradient")
    assert_gradients(layer, reference, 1e-9, config.qk_pos_emb_head_dim)


for layout_name, layout in LAYOUTS[2].items():
    for config_name, config in CASES.items():

        @case(2, f"te/{layout_name}/{config_name}")
        def te_case(
            layout: Layout = layout, config: MLAConfig = config, packing: bool = config_name == "plain"
        ) -> None:
            te_layer_equals_one_rank(layout, config, packing)


# --- keys and values exchanged by Transformer Engine's core attention ---

EXCHANGED = {name: CONFIGS[name] for name in ("plain", "recompute", "gemm", "no_query_latent")}
TE_LAYOUTS = {2: {"cp": Layout(cp=2)}, 4: {name: LAYOUTS[4][name] for name in ("cp4", "tp2_cp2_sp")}}


@contextmanager
def stand_in() -> Iterator[pytest.MonkeyPatch]:
    """The stand-in, serving the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        fake.install(patch)
        patch.setattr(TEAttention, "refusal", lambda self, device, *, packed: None)
        yield patch


def with_exchange(config: MLAConfig, cp_comm_type: str) -> MLAConfig:
    return replace(config, core_attention_backend="te", cp_comm_type=cp_comm_type)


def exchange_equals_one_rank(
    layout: Layout, config: MLAConfig, cp_comm_type: str, backend: str, packing: bool, positions: bool = False
) -> None:
    """Output, input gradient and every parameter's gradient; no latent is gathered on the way."""
    reference = build(config)
    mesh = layout.mesh()
    pack = packed() if packing else None
    torch.manual_seed(1)
    whole, gradient = (torch.randn(32, 1, config.hidden_size, dtype=torch.float64) for _ in range(2))
    options: dict[str, Any] = {"packed_seq_params": pack}
    ids = torch.randperm(50)[:32]
    with stand_in() as patch:
        for gathering in ("KeysOnTheWay", "gather_keys"):
            patch.setattr(collectives, gathering, None)
        layer = MLASelfAttention(with_exchange(config, cp_comm_type), backend=backend, dtype=torch.float64)
        layer.load_state_dict(reference.state_dict())
        parallelize(layer, mesh, sequence_parallel=layout.sequence_parallel)
        given = {"position_ids": ids} if positions else {}
        output, input_gradient, _ = step(reference, whole, gradient, **options, **given)
        given = {"position_ids": layout.cut(ids, mesh, pack)} if positions else {}
        found, found_gradient, _ = step(
            layer, *(layout.cut(t, mesh, pack) for t in (whole, gradient)), **options, **given
        )
        (module,) = layer.core_attention._built.values()
        assert module.exchange[3] == cp_comm_type
        _, key, value, _, _ = layer.get_query_key_value_tensors(layout.cut(whole, mesh, pack), **options)
        assert key.shape[0] == value.shape[0] == 32 // layout.cp
    assert_close(found, layout.cut(output, mesh, pack), 1e-9, "output")
    assert_close(found_gradient, layout.cut(input_gradient, mesh, pack), 1e-9, "input gradient")
    assert_gradients(layer, reference, 1e-9, config.qk_pos_emb_head_dim)


for world, layouts in TE_LAYOUTS.items():
    for layout_name, layout in layouts.items():
        for config_name, config in EXCHANGED.items():
            for cp_comm_type in CP_COMM_TYPES if config_name == "plain" else ("p2p",):

                @case(world, f"te/exchange/{layout_name}/{config_name}/{cp_comm_type}")
                def exchange_case(
                    layout: Layout = layout, config: MLAConfig = config, cp_comm_type: str = cp_comm_type
                ) -> None:
                    if cp_comm_type == "a2a":
                        config = replace(config, num_attention_heads=8)
                    for packing in (False, True):
                        backend = "torch" if config.kv_assembly == "gemm" else "te"
                        exchange_equals_one_rank(layout, config, cp_comm_type, backend, packing)


@case(2, "te/exchange/positions")
def positions_stay_with_their_rows() -> None:
    for packing in (False, True):
        exchange_equals_one_rank(Layout(cp=2), CONFIGS["plain"], "all_gather", "torch", packing, positions=True)


@case(2, "te/exchange/built with groups")
def built_with_groups() -> None:
    """By the constructor, and through a deep copy and a pickle."""
    config = tiny()
    reference = build(config)
    torch.manual_seed(1)
    whole, gradient = (torch.randn(16, 2, config.hidden_size, dtype=torch.float64) for _ in range(2))
    output, input_gradient, _ = step(reference, whole, gradient)
    layout = Layout(cp=2)
    mesh = layout.mesh()
    with stand_in():
        layer = MLASelfAttention(with_exchange(config, "p2p"), cp_group=world_group(), dtype=torch.float64)
        layer.load_state_dict(reference.state_dict())
        for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            found, found_gradient, _ = step(same, layout.cut(whole, mesh, None), layout.cut(gradient, mesh, None))
            assert_close(found, layout.cut(output, mesh, None), 1e-9, "output")
            assert_close(found_gradient, layout.cut(input_gradient, mesh, None), 1e-9, "input gradient")
            assert_gradients(same, reference, 1e-9, config.qk_pos_emb_head_dim)


@case(2, "te/exchange/each layer by its config")
def each_layer_by_its_config() -> None:
    """One `parallelize` for layers that gather latents and layers that exchange keys."""
    torch.manual_seed(1)
    config = tiny()
    model = nn.ModuleList([build(config), build(config)])
    with stand_in():
        other = MLASelfAttention(with_exchange(config, "all_gather"), dtype=torch.float64)
        other.load_state_dict(model[1].state_dict())
        model[1] = other
        parallelize(model, Layout(cp=2).mesh())
        rows = hidden(8)
        torch.testing.assert_close(model[0](rows)[0], model[1](rows)[0])
        assert [layer.comm.cp_comm_type for layer in model] == [None, "all_gather"]


@case(2, "te/exchange/refusals")
def exchange_refusals() -> None:
    """Before anything is changed, and in one line with the numbers."""
    with stand_in():
        for heads, multiple in ((3, 2), (5, 2)):
            config = with_exchange(tiny(num_attention_heads=heads), "a2a")
            for start in (
                lambda config=config: MLASelfAttention(config, cp_group=world_group()),
                lambda config=config: parallelize(MLASelfAttention(config), Layout(cp=2).mesh()),
            ):
                refused(start, "cp_comm_type", "'a2a'", heads, multiple)
            MLASelfAttention(config)  # nothing is dealt out to one rank
        MLASelfAttention(with_exchange(tiny(num_attention_heads=6), "a2a"), tp_group=world_group())
        layer = parallelize(
            MLASelfAttention(tiny(core_attention_backend="te"), dtype=torch.float64), Layout(cp=2).mesh()
        )
        refused(lambda: layer(hidden(4)), "core_attention_backend", "'te'", "cp_comm_type")
        layer = parallelize(MLASelfAttention(with_exchange(tiny(), "p2p"), dtype=torch.float64), Layout(cp=2).mesh())
        refused(lambda: layer(hidden(3)), "hidden_states", 6, 4)
        pack = PackedSeqParams([0, 4, 10, 16])
        refused(lambda: layer(hidden(8), packed_seq_params=pack), "packed_seq_params", 6, 4)
        unread = PackedSeqParams([0, 16], max_seqlen_q=16, validate=False)
        refused(lambda: layer(hidden(8), packed_seq_params=unread), "packed_seq_params", "validate=False")
        for offsets in ([0], [0, 0]):
            nothing = layer(hidden(4), packed_seq_params=PackedSeqParams(offsets))[0]
            assert torch.equal(nothing, torch.zeros_like(nothing))
        assert layer(hidden(0))[0].shape == (0, 1, tiny().hidden_size)


@case(4, "te/exchange/heads of four ranks")
def heads_of_four_ranks() -> None:
    with stand_in():
        config = with_exchange(tiny(num_attention_heads=6), "a2a")
        refused(lambda: MLASelfAttention(config, cp_group=world_group()), "cp_comm_type", 6, 4)
        model = nn.Sequential(build(tiny()), MLASelfAttention(config, dtype=torch.float64))
        refused(lambda: parallelize(model, Layout(cp=4).mesh()), "cp_comm_type", 6, 4)
        assert model[0].comm.cp_size == 1  # nothing was changed
        refused(lambda: parallelize(model, Layout(tp=2, cp=2).mesh()), "cp_comm_type", 3, 2)
    assert dist.get_world_size() == 4
