"""That the comparisons can fail, what travels between ranks, and what the indexer's loss does not depend on."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mla_attention import MLASelfAttention, parallelize
from mla_attention.configs import MLAConfig, tiny
from mla_attention.layers.torch_layers import LocalParameters, identity
from mla_attention.parallel import collectives
from mla_attention.parallel.group_communication import GroupCommunication
from tests.mla_attention.parallel.cases_sparse import DSA
from tests.mla_attention.parallel.layouts import Layout, assert_close, assert_gradients, build, compare, packed, step
from tests.mla_attention.parallel.ranks import case

TP, SP, CP = Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(cp=2)
SPARSE = tiny(**DSA, dsa_indexer_use_sparse_loss=True)


def must_fail(expected: str, layout: Layout, config: MLAConfig, change: Callable[[MLASelfAttention], None]) -> None:
    """The comparison fails on every rank, at the gradient named, once `change` has broken the layer."""

    def changed(layer: MLASelfAttention) -> MLASelfAttention:
        change(layer)
        return layer

    try:
        compare(layout, config, change=changed, options={"return_aux": True})
        message = "nothing was found"
    except AssertionError as error:
        message = str(error)
    messages = [message] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert all(expected in text for text in messages), messages


def with_communication(cls: type[GroupCommunication]) -> Callable[[MLASelfAttention], None]:
    def change(layer: MLASelfAttention) -> None:
        layer.comm = cls(**{f.name: getattr(layer.comm, f.name) for f in fields(layer.comm)})

    return change


def without_sum(*names: str) -> Callable[[MLASelfAttention], None]:
    """Take the reduction out of some layers' gradients."""

    def change(layer: MLASelfAttention) -> None:
        for name in names:
            part = layer.get_submodule(name)
            assert isinstance(part, LocalParameters)
            assert part.sum_gradient is not identity
            part.sum_gradient = identity

    return change


class NoSum(GroupCommunication):
    def to_heads(self, *latents: Tensor) -> tuple[Tensor, ...]:
        return latents


class RotaryKeyNotSummed(GroupCommunication):
    def to_heads(self, *latents: Tensor) -> tuple[Tensor, ...]:
        return (*super().to_heads(*latents[:-1]), latents[-1])


class RotaryKeySummedTwice(GroupCommunication):
    def to_heads(self, *latents: Tensor) -> tuple[Tensor, ...]:
        *others, k_pe = super().to_heads(*latents)
        assert self.tp is not None
        return (*others, *collectives.sum_gradients(self.tp.group, k_pe))


class OnlyOwnKeys(GroupCommunication):
    """Gathers keys, but a rank keeps what its own queries found of their gradient."""

    def start_to_all_keys(self, *latents: Tensor) -> None:
        return None

    def to_all_keys(self, *latents: Tensor, order, started=None) -> tuple[Tensor, ...]:
        assert self.cp is not None
        return tuple(collectives.gather_same_rows(latent, self.cp.group, order) for latent in latents)


class RankOrder(OnlyOwnKeys):
    """Leaves the gathered keys in the order of the ranks."""

    def to_all_keys(self, *latents: Tensor, order, started=None) -> tuple[Tensor, ...]:
        assert self.cp is not None
        return tuple(collectives.gather_rows(latent, self.cp.group) for latent in latents)


@case(2, "the_comparison_fails_without_a_reduction")
def controls() -> None:
    must_fail("input gradient", TP, tiny(), with_communication(NoSum))
    for broken in (RotaryKeyNotSummed, RotaryKeySummedTwice):
        must_fail("input gradient", TP, tiny(), with_communication(broken))
    must_fail("input gradient", SP, tiny(), with_communication(RotaryKeySummedTwice))
    must_fail("input gradient", CP, tiny(), with_communication(OnlyOwnKeys))
    must_fail("output", CP, tiny(), with_communication(RankOrder))
    for layout in (SP, CP):
        for name in ("linear_q_down_proj", "q_layernorm", "linear_kv_down_proj", "kv_layernorm"):
            must_fail(f"gradient of {name}", layout, tiny(), without_sum(name))
        for name in ("linear_wk", "k_norm", "linear_weights_proj"):
            indexer = f"core_attention.indexer.{name}"
            must_fail(f"gradient of {indexer}", layout, SPARSE, without_sum(indexer))
    for name in ("linear_q_up_proj", "linear_kv_up_proj", "linear_proj", "core_attention.indexer.linear_wq_b"):
        must_fail(f"gradient of {name}", CP, SPARSE, without_sum(name))


@case(2, "only_the_rotary_rows_tell_of_the_rotary_key")
def rotary_rows() -> None:
    """With the rotary key's gradient not summed, or twice, the rotary rows are wrong and all others right."""
    config = tiny()
    whole = build(config)
    torch.manual_seed(1)
    hidden, gradient = torch.randn(2, 8, 1, config.hidden_size, dtype=torch.float64)
    step(whole, hidden, gradient)
    wanted = whole.linear_kv_down_proj.weight.grad
    for cls, right in ((GroupCommunication, True), (RotaryKeyNotSummed, False), (RotaryKeySummedTwice, False)):
        layer = parallelize(build(config), TP.mesh())
        with_communication(cls)(layer)
        step(layer, hidden, gradient)
        found = layer.linear_kv_down_proj.weight.grad
        latent = slice(None, config.kv_lora_rank)
        assert_close(found[latent], wanted[latent], 1e-9, "latent rows")
        rotary = slice(config.kv_lora_rank, None)
        assert torch.allclose(found[rotary], wanted[rotary], rtol=1e-6, atol=0) == right


@case(2, "keys_travel_while_the_query_is_projected")
def overlap() -> None:
    """The gather is awaited after the query's down projection, the backward's scatter after that one's gradient."""
    events: list[str] = []
    send, wait = collectives.KeysOnTheWay.send, collectives.KeysOnTheWay.wait

    def noted(event: str, function: Callable) -> Callable:
        def call(*args, **options):
            events.append(event)
            return function(*args, **options)

        return call

    layer = parallelize(build(tiny()), CP.mesh())
    layer.linear_q_down_proj.register_forward_hook(lambda *_: events.append("query"))
    layer.linear_q_down_proj.weight.register_hook(lambda _: events.append("query"))
    with (
        mock.patch.object(collectives.KeysOnTheWay, "send", noted("send", send)),
        mock.patch.object(collectives.KeysOnTheWay, "wait", noted("wait", wait)),
    ):
        output, _ = layer(torch.randn(8, 1, tiny().hidden_size, dtype=torch.float64))
        assert events == ["send", "query", "wait"]
        output.sum().backward()
        assert events == ["send", "query", "wait"] * 2


@contextmanager
def received_bytes() -> Iterator[dict[str, int]]:
    """Bytes that this rank receives from others, by collective."""
    counts: dict[str, int] = {}

    def wrap(name: str, received: Callable[[Tensor, int], int]):
        original = getattr(dist, name)

        def collective(tensor: Tensor, *args, group=None, **options):
            size = dist.get_world_size(group)
            counts[name] = counts.get(name, 0) + received(tensor, size)
            return original(tensor, *args, group=group, **options)

        return mock.patch.object(dist, name, collective)

    def share(t: Tensor, size: int) -> int:
        return t.nbytes * (size - 1) // size

    def all_of_it(t: Tensor, size: int) -> int:
        return t.nbytes * (size - 1)

    new = hasattr(dist, "all_gather_single")  # torch 2.13's names
    gather, scatter = (
        ("all_gather_single", "reduce_scatter_single")
        if new
        else (
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
        )
    )
    with wrap(gather, share), wrap(scatter, all_of_it), wrap("all_reduce", share):
        yield counts


@case(2, "bytes_received_under_context_parallelism")
def bytes_received() -> None:
    """In a forward at most 1.1 x tokens x (Rkv+Dr (+Di)) x element size x (cp-1)/cp; as much again in its backward."""
    for config in (tiny(), SPARSE, tiny(**{**DSA, "dsa_indexer_loss_coeff": 0.0})):
        for dtype in (torch.float64, torch.bfloat16):
            layer = parallelize(build(config, dtype), CP.mesh())
            hidden = torch.randn(128, 1, config.hidden_size, dtype=dtype)
            with received_bytes() as counts:
                layer(hidden)
            channels = config.kv_lora_rank + config.qk_pos_emb_head_dim + (config.dsa_indexer_head_dim or 0)
            allowed = 256 * channels * dtype.itemsize // 2
            found = sum(counts.values())
            assert allowed <= found <= 1.1 * allowed, (found, allowed, counts)
            layer.requires_grad_(False)
            leaf = hidden.requires_grad_()
            with received_bytes() as counts:
                layer(leaf)[0].sum().backward()
            assert sum(counts.values()) <= 2.2 * allowed, (counts, allowed)


@case(2, "bytes_received_under_sequence_parallelism")
def bytes_of_sequence_parallelism() -> None:
    """Rq+Rkv+Dr channels of the other rank's tokens, once, and the output's partial sums."""
    config = tiny()
    layer = parallelize(build(config), SP.mesh(), sequence_parallel=True)
    hidden = torch.randn(128, 1, config.hidden_size, dtype=torch.float64)
    with received_bytes() as counts:
        layer(hidden)
    channels = config.q_lora_rank + config.kv_lora_rank + config.qk_pos_emb_head_dim + config.hidden_size
    allowed = 128 * channels * 8
    assert allowed <= sum(counts.values()) <= 1.1 * allowed, (counts, allowed)


@case(2, "indexer_loss_of_microbatches")
def microbatches() -> None:
    """Two microbatches, each with half the loss, in every layout: the gradients of the whole batch on one rank."""
    for sparse in (True, False):
        config = tiny(**DSA, dsa_indexer_use_sparse_loss=sparse)
        for layout in (TP, SP, CP):
            whole = build(config)
            layer = parallelize(copy.deepcopy(whole), layout.mesh(), sequence_parallel=layout.sequence_parallel)
            mesh = layout.mesh()
            torch.manual_seed(2)
            hidden, gradient = torch.randn(2, 16, 2, config.hidden_size, dtype=torch.float64)
            step(whole, hidden, gradient)
            layer.core_attention.attached_loss_scale = 0.5
            for batch in range(2):
                one = slice(batch, batch + 1)
                step(layer, layout.cut(hidden[:, one], mesh, None), layout.cut(gradient[:, one], mesh, None))
            assert_gradients(layer, whole, 1e-9, config.qk_pos_emb_head_dim)


@case(2, "indexer_loss_reaches_the_indexer_alone")
def indexer_alone() -> None:
    for layout in (TP, SP, CP):
        layer = parallelize(build(SPARSE), layout.mesh(), sequence_parallel=layout.sequence_parallel)
        torch.manual_seed(2)
        hidden = layout.cut(torch.randn(16, 1, SPARSE.hidden_size, dtype=torch.float64), layout.mesh(), None)
        layer(hidden, return_aux=True)[2].indexer_loss.backward()
        for name, parameter in layer.named_parameters():
            trained = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
            assert trained == ("indexer" in name), name


@case(2, "padding_never_leaks_and_neighbours_stay_apart")
def isolation() -> None:
    """NaN in rows without a token changes nothing, nor does another sequence."""
    for config in (tiny(), SPARSE):
        for layout in (TP, SP, CP):
            layer = parallelize(build(config), layout.mesh(), sequence_parallel=layout.sequence_parallel)
            mesh = layout.mesh()
            torch.manual_seed(2)
            hidden = torch.randn(32, 1, config.hidden_size, dtype=torch.float64)
            poisoned = hidden.clone()
            poisoned[9:16] = poisoned[20:] = torch.nan
            other = hidden.clone()
            other[16:20] += 1.0
            clean, dirty, changed = (
                step(layer, layout.cut(h, mesh, packed()), torch.ones(()), packed_seq_params=packed())[:2]
                for h in (hidden, poisoned, other)
            )
            for c, d in zip(clean, dirty, strict=True):
                assert torch.equal(c, d)
            rows = layout.cut(torch.arange(32), mesh, packed())
            first = rows < 16
            for c, d in zip(clean, changed, strict=True):
                assert torch.equal(c[first], d[first])
            if not layout.sequence_parallel:
                assert not torch.equal(clean[0], changed[0])
            assert not clean[0][(rows >= 20) | ((rows >= 9) & first)].any()
