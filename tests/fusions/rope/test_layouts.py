"""Strides, expanded gradients, empty input, and offsets beyond 32 bits."""

import pytest
import torch

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from tests.fusions.rope.support import DEVICE, random, tables, ulps
from tests.guards import guarded

S, B, HEADS, NOPE, EMB, V = 3, 2, 3, 2, 4, 5


def laid_out(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`values` with its dimensions in memory in another order, the last one innermost."""
    back = [order.index(i) for i in range(values.ndim)]
    return values.permute(order).contiguous().permute(back)


ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (2, 1, 0, 3), (2, 0, 1, 3)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_any_order_in_memory_equals_contiguous(order):
    cos, sin = tables(S, EMB)
    values, grad = random(S, B, HEADS, NOPE + EMB), random(S, B, HEADS, NOPE + EMB, seed=1)
    expected = reference.fused_mla_rope_out_of_place(values, cos, sin, NOPE, EMB)
    expected_grad = reference.mla_rope_unapply_raw(grad, cos, sin, NOPE, EMB)
    t = laid_out(values, order)
    strides = t.stride()
    assert torch.equal(fused.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB), expected)
    assert torch.equal(fused.mla_rope_apply_raw_(t, cos, sin, NOPE, EMB), expected)
    assert t.stride() == strides
    g = laid_out(grad, order)
    assert torch.equal(fused.mla_rope_unapply_raw(g, cos, sin, NOPE, EMB), expected_grad)
    out = laid_out(torch.zeros_like(grad), ORDERS[2])
    assert fused.mla_rope_unapply_raw(g, cos, sin, NOPE, EMB, out=out) is out
    assert torch.equal(out, expected_grad)
    assert torch.equal(g, grad)
    assert fused.mla_rope_unapply_raw(g, cos, sin, NOPE, EMB, out=g) is g
    assert torch.equal(g, expected_grad)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_key_value_and_concatenation_of_any_order(order):
    cos, sin = tables(S, EMB)
    kv, pos = random(S, B, HEADS, NOPE + V), random(S, B, 1, EMB)
    nope, rope = random(S, B, HEADS, NOPE), random(S, B, HEADS, EMB)
    expected = reference.fused_mla_rope_kv_split(kv, pos, cos, sin, EMB, NOPE, V)
    got = fused.fused_mla_rope_kv_split(laid_out(kv, order), laid_out(pos, order), cos, sin, EMB, NOPE, V)
    for ours, twins in zip(got, expected, strict=True):
        assert torch.equal(ours, twins)
    joined = fused.fused_mla_rope_concat(laid_out(nope, order), rope, cos, sin)
    assert torch.equal(joined, reference.fused_mla_rope_concat(nope, rope, cos, sin))
    key = laid_out(torch.zeros_like(expected[0]), order)
    fused.rotate_shared_key_into(key, laid_out(pos, order), cos, sin)
    assert torch.equal(key[..., NOPE:], expected[0][..., NOPE:])
    dkey = random(*key.shape, seed=1)
    exact = reference.shared_key_gradient(dkey, cos, sin)
    assert ulps(fused.shared_key_gradient(laid_out(dkey, order), cos, sin), exact) <= 64


def test_a_view_with_gaps_and_a_slice_of_a_wider_tensor():
    cos, sin = tables(S, EMB)
    wide = random(S, B, HEADS, NOPE + EMB + 7)
    t = wide[..., 3 : 3 + NOPE + EMB]
    before = wide.clone()
    expected = reference.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB)
    fused.mla_rope_apply_raw_(t, cos, sin, NOPE, EMB)
    assert torch.equal(t, expected)
    assert torch.equal(wide[..., :3], before[..., :3])
    assert torch.equal(wide[..., 3 + NOPE + EMB :], before[..., 3 + NOPE + EMB :])


def test_packed_rows_with_their_own_strides():
    cos, sin = tables(5, EMB)
    values = random(5, HEADS, NOPE + EMB)
    cu = torch.tensor([0, 2, 5], device=DEVICE)
    t, guard = guarded(values, stride=(100, 9, 1))
    fused.mla_rope_apply_raw_(t, cos, sin, NOPE, EMB, cu)
    guard.check()
    assert torch.equal(t, reference.fused_mla_rope_out_of_place(values, cos, sin, NOPE, EMB, cu))


@pytest.mark.parametrize("expanded", ["sum", "heads", "last"])
def test_expanded_gradients(expanded):
    cos, sin = tables(S, EMB)
    weight = {
        "sum": torch.ones((), device=DEVICE),
        "heads": random(S, B, 1, NOPE + EMB, seed=2),
        "last": random(S, B, HEADS, 1, seed=2),
    }[expanded]
    results = []
    for ops in (fused, reference):
        t = random(S, B, HEADS, NOPE + EMB, grad=True)
        kv, pos = random(S, B, HEADS, NOPE + V, grad=True), random(S, B, 1, EMB, grad=True)
        nope, rope = random(S, B, HEADS, NOPE, grad=True), random(S, B, HEADS, EMB, grad=True)
        outs = (
            ops.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB),
            ops.fused_mla_rope_inplace(t * 1.0, cos, sin, NOPE, EMB),
            ops.fused_mla_rope_kv_split(kv, pos, cos, sin, EMB, NOPE, EMB + V - EMB)[0],
            ops.fused_mla_rope_concat(nope, rope, cos, sin),
        )
        grads = [weight.expand_as(o) for o in outs]
        results.append(torch.autograd.grad(outs, (t, kv, pos, nope, rope), grads))
    for ours, twins in zip(*results, strict=True):
        torch.testing.assert_close(ours, twins, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_zero_tokens_in_zero_tokens_out(packed):
    cos, sin = tables(4, EMB)
    cu = torch.zeros(1, dtype=torch.int32, device=DEVICE) if packed else None
    tokens = (0,) if packed else (0, 2)
    for ops in (fused, reference):
        t = random(*tokens, HEADS, NOPE + EMB, grad=True)
        kv, pos = random(*tokens, HEADS, NOPE + V, grad=True), random(*tokens, 1, EMB, grad=True)
        outs = (
            ops.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB, cu),
            ops.fused_mla_rope_inplace(t * 1.0, cos, sin, NOPE, EMB, cu),
            *ops.fused_mla_rope_kv_split(kv, pos, cos, sin, EMB, NOPE, V, cu),
            ops.fused_mla_rope_concat(t[..., :NOPE], t[..., NOPE:], cos, sin, cu),
        )
        assert all(o.shape[: len(tokens)] == tokens for o in outs)
        grads = torch.autograd.grad([o.sum() for o in outs], (t, kv, pos))
        assert [g.shape for g in grads] == [t.shape, kv.shape, pos.shape]
        assert ops.shared_key_gradient(outs[2].detach(), cos, sin, cu).shape == (*tokens, 1, EMB)
    assert fused.fused_mla_rope_out_of_place(random(0, 2, HEADS, NOPE + EMB), cos[:0], sin[:0], NOPE, EMB).numel() == 0


def far_apart(tokens: int, heads: int, width: int, dtype: torch.dtype, token_stride: int) -> torch.Tensor:
    """Tokens so far apart that a 32-bit element offset wraps. Only the pages that are touched exist."""
    elements = (tokens - 1) * token_stride + heads * width
    try:
        buffer = torch.empty(elements, dtype=dtype, device=DEVICE)
    except RuntimeError:
        pytest.skip(f"needs {elements * dtype.itemsize >> 30} GiB of address space")
    return buffer.as_strided((tokens, heads, width), (token_stride, width, 1))


def test_offsets_beyond_32_bits_equal_contiguous():
    tokens, heads, stride = 3, 2, 1_100_000_000
    cu = torch.tensor([0, tokens], device=DEVICE)
    cos, sin = tables(tokens, EMB)
    values = random(tokens, heads, NOPE + EMB, dtype=torch.bfloat16)
    expected = reference.fused_mla_rope_out_of_place(values, cos, sin, NOPE, EMB, cu)
    t = far_apart(tokens, heads, NOPE + EMB, torch.bfloat16, stride)
    t.copy_(values)
    assert torch.equal(fused.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB, cu), expected)
    assert torch.equal(fused.mla_rope_apply_raw_(t, cos, sin, NOPE, EMB, cu), expected)
    back = reference.mla_rope_unapply_raw(expected, cos, sin, NOPE, EMB, cu)
    assert torch.equal(fused.mla_rope_unapply_raw(t, cos, sin, NOPE, EMB, cu, out=t), back)


def test_key_value_offsets_beyond_32_bits_equal_contiguous():
    tokens, heads, stride = 3, 2, 1_100_000_000
    cu = torch.tensor([0, tokens], device=DEVICE)
    cos, sin = tables(tokens, EMB)
    values, pos = random(tokens, heads, NOPE + V, dtype=torch.bfloat16), random(tokens, 1, EMB, dtype=torch.bfloat16)
    kv = far_apart(tokens, heads, NOPE + V, torch.bfloat16, stride)
    kv.copy_(values)
    expected = reference.fused_mla_rope_kv_split(values, pos, cos, sin, EMB, NOPE, V, cu)
    for ours, twins in zip(fused.fused_mla_rope_kv_split(kv, pos, cos, sin, EMB, NOPE, V, cu), expected, strict=True):
        assert torch.equal(ours, twins)
    del kv
    key = far_apart(tokens, heads, NOPE + EMB, torch.bfloat16, stride)
    key[..., :NOPE] = values[..., :NOPE]
    assert torch.equal(fused.rotate_shared_key_into(key, pos, cos, sin, cu), expected[0])
    assert ulps(
        fused.shared_key_gradient(key, cos, sin, cu), reference.shared_key_gradient(expected[0], cos, sin, cu)
    ) <= (0 if DEVICE == "cpu" else 1)
