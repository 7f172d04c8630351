"""scaled_dot_product_attention as a back end: what it is called with."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from mla_attention import PackedSeqParams
from mla_attention.core_attention import interface
from mla_attention.core_attention.eager import EagerAttention
from mla_attention.core_attention.sdpa import SDPAttention
from mla_attention.token_layout import TokenLayout

QK, V, HEADS = 24, 16, 3
PACKS = {
    "one length": ([0, 6, 12, 18], 18, [(6, 3)]),
    "runs": ([0, 4, 8, 8, 12, 17, 22, 23], 23, [(4, 3), (5, 2), (1, 1)]),
    "rows past the last": ([0, 5, 10], 14, [(5, 2)]),
    "no rows": ([0, 0, 0], 0, []),
    "no sequence": ([0], 3, []),
}


def layout(rows, packed=None):
    empty = torch.empty(0)
    return TokenLayout(1, rows, empty, empty, packed)


def operands(*lead):
    torch.manual_seed(0)
    return tuple(torch.randn(*lead, HEADS, d, dtype=torch.float64, requires_grad=True) for d in (QK, QK, V))


@pytest.mark.parametrize("name", PACKS)
def test_neighbours_of_one_length_go_as_a_batch(name, monkeypatch):
    offsets, rows, runs = PACKS[name]
    packed = PackedSeqParams(offsets)
    assert packed.equal_runs == tuple(runs)
    shapes = []
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **o: shapes.append(q.shape) or attention(q, *a, **o)
    )
    tensors = operands(rows)
    output = SDPAttention(QK, V, 0.2)(*tensors, layout(rows, packed))
    assert [(shape[2], shape[0]) for shape in shapes] == runs
    eager = EagerAttention(QK, V, 0.2)(*tensors, layout(rows, packed))
    torch.testing.assert_close(output, eager, rtol=1e-12, atol=1e-12)
    assert not output[offsets[-1] :].any()
    alone = [
        SDPAttention(QK, V, 0.2)(*(t[a:b, None] for t in tensors), layout(b - a))[:, 0] for a, b in pairwise(offsets)
    ]
    torch.testing.assert_close(output[: offsets[-1]], torch.cat([output[:0], *alone]), rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(output)
    found, wanted = (torch.autograd.grad(o, tensors, direction, allow_unused=True) for o in (output, eager))
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=1e-12, atol=1e-12)


def test_one_run_is_neither_cut_nor_put_together():
    tensors = operands(12)
    output = SDPAttention(QK, V, 0.2)(*tensors, layout(12, PackedSeqParams([0, 4, 8, 12])))
    nodes, names = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        names.add(type(node).__name__)
        nodes += [n for n, _ in node.next_functions if n is not None]
    assert not any("Cat" in name or "Split" in name for name in names), names


@pytest.mark.parametrize("packing", [False, True])
def test_gradients_arrive_contiguous(packing, monkeypatch):
    """torch's cuDNN plans are found without the strides of the gradient, which are in them."""
    arrived = []
    attention = F.scaled_dot_product_attention

    def watched(*arguments, **options):
        output = attention(*arguments, **options)
        output.register_hook(lambda gradient: arrived.append(gradient.permute(2, 0, 1, 3).is_contiguous()))
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    core = SDPAttention(QK, V, 0.2)
    lead, packed = ((12,), PackedSeqParams([0, 12])) if packing else ((12, 1), None)
    direction = torch.randn(*lead, 2 * HEADS, V, dtype=torch.float64)[..., :HEADS, :]
    assert not direction.is_contiguous()
    core(*operands(*lead), layout(12, packed)).backward(direction)
    core(*operands(*lead), layout(12, packed)).sum().backward()  # a gradient of stride 0
    assert arrived == [True, True]


def test_what_others_do_with_an_output_still_works():
    core, tensors = SDPAttention(QK, V, 0.2), operands(12, 1)

    def loss(*qkv):
        return core(*qkv, layout(12)).square().sum()

    plain = torch.autograd.grad(loss(*tensors), tensors)
    for found in (torch.func.grad(loss, argnums=(0, 1, 2))(*tensors),):
        for f, w in zip(found, plain, strict=True):
            torch.testing.assert_close(f, w)
    _, slope = torch.func.jvp(loss, tensors, tensors)
    torch.testing.assert_close(slope, sum((g * t).sum() for g, t in zip(plain, tensors, strict=True)))
    output = core(*tensors, layout(12))
    output.mul_(2.0)  # as a forward hook may
    torch.testing.assert_close(torch.autograd.grad(output.square().sum() / 4, tensors), plain)


@pytest.mark.parametrize("cls", [SDPAttention, EagerAttention])
def test_a_batch_holds_no_more_scores_than_the_limit(cls, monkeypatch):
    monkeypatch.setattr(interface, "_SCORES", 2 * HEADS * 5 * 5)
    packed = PackedSeqParams([0, 5, 10, 15, 20, 25])
    batches = []
    attend = cls._attend
    monkeypatch.setattr(
        cls, "_attend", lambda self, q, *rest, **more: batches.append(q.shape[1]) or attend(self, q, *rest, **more)
    )
    tensors = operands(25)
    output = cls(QK, V, 0.2)(*tensors, layout(25, packed))
    assert batches == [2, 2, 1]
    alone = [
        EagerAttention(QK, V, 0.2)(*(t[a : a + 5, None] for t in tensors), layout(5))[:, 0] for a in range(0, 25, 5)
    ]
    torch.testing.assert_close(output, torch.cat(alone), rtol=1e-12, atol=1e-12)
