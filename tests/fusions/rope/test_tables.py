"""Tables with equal halves: read by half where that is known, and only there."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from mla_attention import RotaryEmbedding, fusions
from mla_attention.fusions.rope.tables import has_equal_halves, mark_equal_halves
from tests.fusions.rope.support import DEVICE, random

TOKENS, HEADS, NOPE, EMB, VALUE = 5, 3, 6, 12, 10


def repeating() -> tuple[Tensor, Tensor]:
    angle = random(TOKENS, 1, 1, EMB // 2, seed=3).repeat(1, 1, 1, 2)
    return angle.cos(), angle.sin()


def half_poisoned(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The tables with NaN for their right halves, marked nevertheless: who reads those shows it."""
    tables = tuple(t.clone() for t in tables)
    for t in tables:
        t[..., EMB // 2 :] = float("nan")
    return tuple(mark_equal_halves(t) for t in tables)


def tensor(heads: int, width: int, packed: bool, seed: int) -> Tensor:
    return random(*((TOKENS,) if packed else (TOKENS, 1)), heads, width, seed=seed, grad=True)


def rotate_query(function: str, tables, cu, packed):
    t = tensor(HEADS, NOPE + EMB, packed, 1)
    return getattr(fusions, function)(t * 1, *tables, NOPE, EMB, cu), (t,)


def split(_, tables, cu, packed):
    kv, pos = tensor(HEADS, NOPE + VALUE, packed, 1), tensor(1, EMB, packed, 2)
    return fusions.fused_mla_rope_kv_split(kv, pos, *tables, EMB, NOPE, VALUE, cu), (kv, pos)


def concat(_, tables, cu, packed):
    nope, rope = tensor(HEADS, NOPE, packed, 1), tensor(HEADS, EMB, packed, 2)
    return fusions.fused_mla_rope_concat(nope, rope, *tables, cu), (nope, rope)


def shared_key(_, tables, cu, packed):
    key, pos = tensor(HEADS, NOPE + EMB, packed, 1).detach(), tensor(1, EMB, packed, 2)
    into = fusions.rotate_shared_key_into(key.clone(), pos, *tables, cu)
    return (into, fusions.shared_key_gradient(key, *tables, cu)), ()


CALLS = [
    (rotate_query, "fused_mla_rope_inplace"),
    (rotate_query, "fused_mla_rope_out_of_place"),
    (split, ""),
    (concat, ""),
    (shared_key, ""),
]


def run(call, function, tables, packed) -> list[Tensor]:
    """Outputs and gradients."""
    cu = torch.tensor([0, 2, TOKENS], dtype=torch.int32, device=DEVICE) if packed else None
    outputs, inputs = call(function, tables, cu, packed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not inputs:
        return list(outputs)
    grads = [random(*o.shape, seed=11) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("call", "function"), CALLS, ids=lambda x: getattr(x, "__name__", x))
def test_a_marked_table_is_read_by_half_to_the_same_bits(call, function, packed):
    whole = run(call, function, repeating(), packed)
    half = run(call, function, half_poisoned(repeating()), packed)
    for a, b in zip(whole, half, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("which", [0, 1])
def test_both_tables_must_be_marked(which):
    tables = list(half_poisoned(repeating()))
    tables[which] = tables[which].clone()
    assert not has_equal_halves(*tables)
    assert run(*CALLS[0], tuple(tables), False)[0].isnan().any()


def test_a_table_changed_in_place_is_read_whole():
    tables = tuple(mark_equal_halves(t) for t in repeating())
    assert has_equal_halves(*tables)
    for t in tables:
        t[..., EMB // 2 :] *= 0.5  # through a view: it counts as the table's change
    assert not has_equal_halves(*tables)
    unmarked = tuple(t.clone() for t in tables)
    for a, b in zip(run(*CALLS[0], tables, False), run(*CALLS[0], unmarked, False), strict=True):
        assert torch.equal(a, b)


def pickled(t: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(t))


@pytest.mark.parametrize(
    "other", [lambda t: t[1:], Tensor.clone, Tensor.bfloat16, Tensor.detach, copy.copy, copy.deepcopy, pickled]
)
@pytest.mark.parametrize("changes", [0, 1])
def test_another_tensor_does_not_inherit_the_mark(other, changes):
    """Whatever version a copy starts with: copies of Python attributes bring the mark along."""
    table = repeating()[0]
    for _ in range(changes):
        table.mul_(1)
    assert has_equal_halves(mark_equal_halves(table))
    assert not has_equal_halves(other(table))


def test_tensors_of_inference_mode_are_never_marked():
    with torch.inference_mode():
        table = repeating()[0]
        assert not has_equal_halves(mark_equal_halves(table))


@pytest.mark.parametrize(
    "cut", [{}, {"cp_rank": 1, "cp_size": 2}, {"cp_rank": 1, "cp_size": 2, "packed": True}], ids=str
)
def test_our_own_tables_are_marked_and_do_have_equal_halves(cut):
    tables = RotaryEmbedding(EMB, 1234.0).cos_sin(8, device=DEVICE, **cut)
    assert has_equal_halves(*tables)
    for t in tables:
        assert torch.equal(t[..., : EMB // 2], t[..., EMB // 2 :])


def test_a_shared_table_that_somebody_changed_is_no_longer_marked():
    rotary = RotaryEmbedding(EMB, 4321.0)
    cos, _ = rotary.cos_sin(8, device=DEVICE)
    cos[..., : EMB // 2] = 0
    assert not has_equal_halves(*rotary.cos_sin(8, device=DEVICE))
