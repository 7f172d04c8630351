"""The in-place rotation under autograd: histories, version counters, hooks, checkpointing."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from tests.fusions.rope.support import random, tables

S, B, HEADS, NOPE, EMB = 3, 2, 2, 2, 4
WIDTH = NOPE + EMB
COS, SIN = tables(S, EMB)
OPS = pytest.mark.parametrize("ops", [fused, reference], ids=["fused", "twin"])


class _Identity(torch.autograd.Function):
    """Returns its input, as tensor-parallel copies do: a view made by a custom Function."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class _Reshaping(torch.autograd.Function):
    """Returns a reshaped result of its own, as some linear layers do."""

    @staticmethod
    def forward(ctx, x):
        return (3 * x).view(-1, HEADS * WIDTH).view(S, B, HEADS * WIDTH)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad.view(S, B, HEADS, WIDTH)


def as_is(x: Tensor) -> Tensor:
    return x * 3


def whole_view(x: Tensor) -> Tensor:
    return (x * 3).view(S, B, HEADS * WIDTH).view(S, B, HEADS, WIDTH)


def partial_view(x: Tensor) -> Tensor:
    return torch.cat((x * 3, x), 2)[:, :, :HEADS]


def strided_view(x: Tensor) -> Tensor:
    return (x * 3).transpose(0, 1).contiguous().transpose(0, 1)


def from_custom_function(x: Tensor) -> Tensor:
    return _Reshaping.apply(x).view(S, B, HEADS, WIDTH)


MAKERS = (as_is, whole_view, partial_view, strided_view, from_custom_function)


def exact(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    out = reference.fused_mla_rope_out_of_place(3 * x, COS, SIN, NOPE, EMB)
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


@OPS
@pytest.mark.parametrize("make", MAKERS)
def test_result_and_gradient_for_every_kind_of_tensor(ops, make):
    x, grad = random(S, B, HEADS, WIDTH, grad=True), random(S, B, HEADS, WIDTH, seed=1)
    out, dx = exact(x, grad)
    t = make(x)
    rotated = ops.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB)
    assert torch.equal(rotated.detach(), out)
    assert torch.equal(t.detach(), out)
    assert rotated.shape == t.shape
    assert rotated.stride() == t.stride()
    if ops is fused or make is not from_custom_function:
        assert rotated.data_ptr() == t.data_ptr()
    torch.testing.assert_close(torch.autograd.grad(rotated, x, grad)[0], dx)


@OPS
def test_without_autograd_the_tensor_itself_comes_back(ops):
    t = random(S, B, HEADS, WIDTH)
    assert ops.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB) is t
    with torch.no_grad():
        x = random(S, B, HEADS, WIDTH, grad=True)
        assert ops.fused_mla_rope_inplace(x, COS, SIN, NOPE, EMB) is x
    with torch.inference_mode():
        t = random(S, B, HEADS, WIDTH)
        assert ops.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB) is t
    x = random(S, B, HEADS, WIDTH, grad=True) * 3
    assert ops.fused_mla_rope_inplace(x, COS, SIN, NOPE, EMB) is x


@OPS
@pytest.mark.parametrize("make", [as_is, whole_view, partial_view, strided_view])
def test_using_the_argument_afterwards_means_the_rotated_tensor(ops, make):
    x, grad = random(S, B, HEADS, WIDTH, grad=True), random(S, B, HEADS, WIDTH, seed=1)
    _, dx = exact(x, grad)
    t = make(x)
    ops.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB)
    torch.testing.assert_close(torch.autograd.grad(t, x, grad)[0], dx)


def test_using_the_base_afterwards_means_the_rotated_tensor():
    x, grad = random(S, B, HEADS, WIDTH, grad=True), random(S, B, HEADS, WIDTH, seed=1)
    _, dx = exact(x, grad)
    base = x * 3
    fused.fused_mla_rope_inplace(base.view(S, B, HEADS, WIDTH), COS, SIN, NOPE, EMB)
    torch.testing.assert_close(torch.autograd.grad(base, x, grad)[0], dx)


def test_using_the_output_of_a_custom_function_afterwards_raises():
    x = random(S, B, HEADS, WIDTH, grad=True)
    t = from_custom_function(x)
    fused.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB)
    with pytest.raises(RuntimeError, match="custom Function"):
        (t * 2).sum().backward()


@OPS
@pytest.mark.parametrize("make", MAKERS)
def test_a_tensor_saved_before_raises_in_backward(ops, make):
    x = random(S, B, HEADS, WIDTH, grad=True)
    t = make(x)
    square = t * t  # saves t
    rotated = ops.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        (square.sum() + rotated.sum()).backward()


@OPS
def test_raw_application_is_noticed_too(ops):
    x = random(S, B, HEADS, WIDTH, grad=True)
    t = x * 3
    square = t * t
    with torch.no_grad():
        ops.mla_rope_apply_raw_(t, COS, SIN, NOPE, EMB)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    t = random(S, B, HEADS, WIDTH)
    square = x * t
    ops.mla_rope_unapply_raw(t, COS, SIN, NOPE, EMB, out=t)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@OPS
def test_leaves_and_views_of_leaves_are_refused_before_they_change(ops):
    x = random(S, B, HEADS, WIDTH, grad=True)
    before = x.detach().clone()
    for t in (x, x.view(S, B, HEADS, WIDTH), x[:, :, :1], x.detach().requires_grad_()):
        with pytest.raises(RuntimeError, match=r"leaf"):
            ops.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "make",
    [lambda x: (x * 3).unbind(3)[0].unbind(3)[0], lambda x: _Identity.apply(x * 3)],
    ids=["several views at once", "identity of a differentiable tensor"],
)
def test_views_that_autograd_cannot_update_are_refused_before_they_change(make):
    x = random(S, B, HEADS, 1, 1, WIDTH, grad=True)
    t = make(x)
    t = t if t.ndim == 4 else t.view(S, B, HEADS, WIDTH)
    before = t.detach().clone()
    with pytest.raises(RuntimeError, match="cannot rewrite"):
        fused.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB)
    assert torch.equal(t.detach(), before)


@pytest.mark.parametrize("make", MAKERS)
def test_hooks_see_the_gradient_of_what_they_hang_on(make):
    x, grad = random(S, B, HEADS, WIDTH, grad=True), random(S, B, HEADS, WIDTH, seed=1)
    _, dx = exact(x, grad)
    seen = {}

    def record(name: str):
        def hook(gradient: Tensor) -> None:
            seen[name] = gradient.clone()

        return hook

    before = x * 1.0
    before.register_hook(record("before"))
    rotated = fused.fused_mla_rope_inplace(make(before), COS, SIN, NOPE, EMB)
    rotated.register_hook(record("after"))
    rotated.backward(grad)
    assert torch.equal(seen["after"], grad)
    torch.testing.assert_close(seen["before"], dx)
    torch.testing.assert_close(x.grad, dx)


@pytest.mark.parametrize("make", MAKERS)
def test_an_output_used_twice(make):
    x, grad = random(S, B, HEADS, WIDTH, grad=True), random(S, B, HEADS, WIDTH, seed=1)
    _, dx = exact(x, grad)
    rotated = fused.fused_mla_rope_inplace(make(x), COS, SIN, NOPE, EMB)
    ((rotated * grad).sum() + (rotated * grad).sum()).backward()
    torch.testing.assert_close(x.grad, 2 * dx)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", MAKERS)
def test_checkpointing(make, use_reentrant):
    x, grad = random(S, B, HEADS, WIDTH, grad=True), random(S, B, HEADS, WIDTH, seed=1)
    _, dx = exact(x, grad)

    def block(value: Tensor) -> Tensor:
        return fused.fused_mla_rope_inplace(make(value), COS, SIN, NOPE, EMB) * 1.0

    checkpoint(block, x, use_reentrant=use_reentrant).backward(grad)
    torch.testing.assert_close(x.grad, dx)


@pytest.mark.parametrize("make", MAKERS)
def test_retained_graphs_give_the_same_gradient_again(make):
    x, grad = random(S, B, HEADS, WIDTH, grad=True), random(S, B, HEADS, WIDTH, seed=1)
    rotated = fused.fused_mla_rope_inplace(make(x), COS, SIN, NOPE, EMB) * 1.0
    first = torch.autograd.grad(rotated, x, grad, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(rotated, x, grad)[0], first)


def test_double_backward_raises():
    def differentiated_twice(out: Tensor, x: Tensor) -> None:
        (dx,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
        dx.sum().backward()

    kv, pos = random(S, B, HEADS, 2 * NOPE, grad=True), random(S, B, 1, EMB, grad=True)
    x = random(S, B, HEADS, WIDTH, grad=True)
    cases = [
        (lambda: fused.fused_mla_rope_inplace(x * 3, COS, SIN, NOPE, EMB), x),
        (lambda: fused.fused_mla_rope_out_of_place(x, COS, SIN, NOPE, EMB), x),
        (lambda: fused.fused_mla_rope_kv_split(kv, pos, COS, SIN, EMB, NOPE, NOPE)[0], pos),
        (lambda: fused.fused_mla_rope_concat(kv[..., :1], x[..., :EMB], COS, SIN), x),
    ]
    for make, source in cases:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            differentiated_twice(make(), source)
