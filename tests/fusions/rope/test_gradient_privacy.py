"""No gradient that anyone else can see is modified; one that nobody can see is rotated where it lies."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from mla_attention.fusions.rope import inplace
from tests.fusions.rope.support import DEVICE, random, tables

S, B, HEADS, NOPE, EMB = 2, 2, 2, 2, 4
SHAPE = (S, B, HEADS, NOPE + EMB)
COS, SIN = tables(S, EMB)
COUNTED = pytest.mark.skipif(not hasattr(Tensor, "_use_count"), reason="this torch does not tell a tensor's use count")


def rope(t: Tensor) -> Tensor:
    return fused.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB)


def expected_gradient(grad: Tensor) -> Tensor:
    return reference.mla_rope_unapply_raw(grad, COS, SIN, NOPE, EMB)


@pytest.fixture
def in_place_calls(monkeypatch):
    """Counts the backward passes that overwrote their gradient."""
    calls = []
    inner = inplace.rope_inplace

    def counting(t, *arguments):
        if arguments[-1]:
            calls.append(tuple(t.shape))
        return inner(t, *arguments)

    monkeypatch.setattr(inplace, "rope_inplace", counting)
    return calls


def start(view: bool = False) -> tuple[Tensor, Tensor]:
    x = random(*SHAPE, grad=True)
    t = x * 1.0
    return x, rope(t.view(S, B, -1).view(SHAPE) if view else t)


@COUNTED
@pytest.mark.parametrize("view", [False, True])
def test_a_private_gradient_is_rotated_where_it_lies(in_place_calls, view):
    x, y = start(view)
    weight = random(*SHAPE, seed=1)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, expected_gradient(weight))
    assert len(in_place_calls) == 1
    x, y = start(view)
    (y.permute(1, 2, 0, 3) * weight.permute(1, 2, 0, 3)).sum().backward()
    assert torch.equal(x.grad, expected_gradient(weight))


@COUNTED
def test_a_private_permuted_gradient_is_rotated_where_it_lies(in_place_calls):
    """Attention back ends hand over the gradient of a permuted query."""
    x, y = start()
    weight = random(*SHAPE, seed=1).permute(1, 2, 0, 3).contiguous()
    (y.permute(1, 2, 0, 3) * weight).sum().backward()
    assert torch.equal(x.grad, expected_gradient(weight.permute(2, 0, 1, 3)))
    assert len(in_place_calls) == 1


def test_the_callers_own_gradient(in_place_calls):
    x, y = start()
    grad = random(*SHAPE, seed=1)
    before = grad.clone()
    y.backward(grad)
    assert torch.equal(grad, before)
    assert torch.equal(x.grad, expected_gradient(before))
    assert not in_place_calls


@pytest.mark.parametrize("what", ["tensor", "detached", "view", "storage", "numpy"])
def test_a_gradient_kept_by_a_hook(what, in_place_calls):
    x, y = start()
    kept = []

    def keep(grad: Tensor) -> None:
        kept.append(
            {
                "tensor": lambda: grad,
                "detached": grad.detach,
                "view": lambda: grad[1:],
                "storage": grad.untyped_storage,
                "numpy": lambda: grad.numpy() if DEVICE == "cpu" else grad,
            }[what]()
        )

    y.register_hook(keep)
    weight = random(*SHAPE, seed=1)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, expected_gradient(weight))
    (seen,) = kept
    if isinstance(seen, torch.UntypedStorage):
        seen = torch.empty(0, device=DEVICE).set_(seen, 0, SHAPE)
    seen = torch.as_tensor(seen)
    assert torch.equal(seen, weight[1:] if what == "view" else weight)
    assert not in_place_calls


def test_a_retained_gradient(in_place_calls):
    x, y = start()
    y.retain_grad()
    weight = random(*SHAPE, seed=1)
    (y * weight).sum().backward()
    assert torch.equal(y.grad, weight)
    assert torch.equal(x.grad, expected_gradient(weight))


def test_a_gradient_seen_by_a_node_hook(in_place_calls):
    x, y = start()
    kept = []
    y.grad_fn.register_prehook(lambda grads: kept.extend(grads) or None)
    weight = random(*SHAPE, seed=1)
    (y * weight).sum().backward()
    assert torch.equal(kept[0], weight)
    x, y = start()
    kept = []
    y.grad_fn.register_hook(lambda grads_in, grads_out: kept.extend(grads_out) or None)
    (y * weight).sum().backward()
    assert torch.equal(kept[0], weight)
    assert torch.equal(x.grad, expected_gradient(weight))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("ours_first", [False, True])
def test_a_gradient_shared_by_both_operands_of_a_sum(ours_first, view):
    """The sum hands one gradient to both; whichever branch runs first, the other sees it unmodified."""
    weight = random(*SHAPE, seed=1)
    if ours_first:
        leaf = random(*SHAPE, grad=True)
        other = leaf.clone()
        x, y = start(view)
    else:
        x, y = start(view)
        leaf = random(*SHAPE, grad=True)
        other = leaf.clone()
    ((y + other) * weight).sum().backward()
    assert torch.equal(leaf.grad, weight)
    assert torch.equal(x.grad, expected_gradient(weight))


def test_a_gradient_shared_with_another_rotation():
    weight = random(*SHAPE, seed=1)
    (x1, y1), (x2, y2) = start(), start()
    ((y1 + y2) * weight).sum().backward()
    assert torch.equal(x1.grad, expected_gradient(weight))
    assert torch.equal(x2.grad, expected_gradient(weight))


def test_a_gradient_shared_with_a_leaf():
    x, y = start()
    leaf = random(*SHAPE, grad=True)
    weight = random(*SHAPE, seed=1)
    ((y + leaf) * weight).sum().backward()
    assert torch.equal(leaf.grad, weight)
    assert torch.equal(x.grad, expected_gradient(weight))


def test_a_gradient_that_is_also_a_result():
    x, y = start()
    weight = random(*SHAPE, seed=1)
    dx, dy = torch.autograd.grad((y * weight).sum(), (x, y))
    assert torch.equal(dy, weight)
    assert torch.equal(dx, expected_gradient(weight))


def test_an_expanded_gradient(in_place_calls):
    x, y = start()
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected_gradient(torch.ones(SHAPE, device=DEVICE)))
    assert not in_place_calls


def test_a_gradient_of_a_graph_that_is_differentiated_again(in_place_calls):
    x, y = start()
    torch.autograd.grad((y * random(*SHAPE, seed=1)).sum(), x, create_graph=True)
    torch.autograd.grad((y.square()).sum(), x, create_graph=True)
    assert len(in_place_calls) <= 1


def test_a_gradient_whose_base_is_kept(in_place_calls):
    """The gradient is a view; a hook keeps what it is a view of."""
    x, y = start()
    kept = []
    flat = y.view(-1)
    flat.register_hook(lambda grad: kept.append(grad))
    weight = random(*SHAPE, seed=1)
    (flat * weight.view(-1)).sum().backward()
    assert torch.equal(kept[0], weight.view(-1))
    assert torch.equal(x.grad, expected_gradient(weight))
    assert not in_place_calls


def test_slices_of_one_gradient():
    """Two rotated halves of one tensor hand back views of one buffer."""
    x = random(S, B, 2 * HEADS, NOPE + EMB, grad=True)
    first, second = (x * 1.0).clone(), (x * 1.0).clone()
    joined = torch.cat((rope(first[:, :, :HEADS].clone()), rope(second[:, :, HEADS:].clone())), 2)
    weight = random(*joined.shape, seed=1)
    (joined * weight).sum().backward()
    assert torch.equal(x.grad, expected_gradient(weight))


def test_nothing_is_kept_alive():
    _, y = start()
    alive = weakref.ref(y)
    (y * 2).sum().backward()
    del y
    gc.collect()
    assert alive() is None


def test_other_modes_answer_no(in_place_calls):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x, y = start()
    weight = random(*SHAPE, seed=1)
    with Watching():
        (y * weight).sum().backward()
    assert torch.equal(x.grad, expected_gradient(weight))
    assert not in_place_calls


def test_a_private_gradient_without_a_unit_last_stride(in_place_calls):
    """The kernels read rows with a stride of 1; such a gradient is copied."""
    x, y = start()
    weight = random(S, B, NOPE + EMB, HEADS, seed=1)
    (y.transpose(2, 3) * weight).sum().backward()
    assert torch.equal(x.grad, expected_gradient(weight.transpose(2, 3)))
    assert not in_place_calls
