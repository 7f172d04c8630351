"""Forward and backward of every rotary function against fp64 matrices, and against the twins."""

import pytest
import torch

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from tests.fusions.rope.support import (
    DEVICE,
    DTYPES,
    FLAGS,
    assert_rounded_once,
    oracle,
    random,
    sbhd_positions,
    tables,
    ulps,
)

S, B, HEADS, NOPE, EMB = 3, 2, 3, 4, 6
BOTH = pytest.mark.parametrize("ops", [fused, reference], ids=["fused", "twin"])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_query_forward_and_backward(ops, dtype, flags):
    cos, sin = tables(S, EMB)
    t = random(S, B, HEADS, NOPE + EMB, dtype=dtype, grad=True)
    grad = random(S, B, HEADS, NOPE + EMB, dtype=dtype, seed=1)
    exact = oracle(t.detach(), cos, sin, NOPE, EMB, sbhd_positions(S, B), **flags)
    exact_grad = oracle(grad, cos, sin, NOPE, EMB, sbhd_positions(S, B), transposed=True, **flags)
    for function in (ops.fused_mla_rope_out_of_place, ops.fused_mla_rope_inplace):
        out = function(t * 1.0, cos, sin, NOPE, EMB, **flags)
        assert_rounded_once(out.detach(), exact)
        (dt,) = torch.autograd.grad((out * grad).sum(), t)
        assert_rounded_once(dt, exact_grad)
    raw = t.detach().clone()
    assert ops.mla_rope_apply_raw_(raw, cos, sin, NOPE, EMB, **flags) is raw
    assert torch.equal(raw, out.detach())
    assert torch.equal(ops.mla_rope_unapply_raw(grad, cos, sin, NOPE, EMB, **flags), dt)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_equals_the_twin_bit_for_bit(dtype, table_dtype):
    cos, sin = tables(S, EMB, table_dtype)
    t = random(S, B, HEADS, NOPE + EMB, dtype=dtype, grad=True)
    grad = random(S, B, HEADS, NOPE + EMB, dtype=dtype, seed=1)
    for flags in FLAGS:
        results = []
        for ops in (fused, reference):
            out = ops.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB, **flags)
            results.append((out.detach(), torch.autograd.grad(out, t, grad)[0]))
        for ours, twins in zip(*results, strict=True):
            assert torch.equal(ours, twins), flags


@BOTH
@pytest.mark.parametrize("remove_interleaving", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_key_value_split(ops, dtype, remove_interleaving):
    width_v = 5
    cos, sin = tables(S, EMB)
    kv = random(S, B, HEADS, NOPE + width_v, dtype=dtype, grad=True)
    pos = random(S, B, 1, EMB, dtype=dtype, grad=True)
    key, value = ops.fused_mla_rope_kv_split(
        kv, pos, cos, sin, EMB, NOPE, width_v, remove_interleaving=remove_interleaving
    )
    assert key.is_contiguous()
    assert value.is_contiguous()
    assert torch.equal(key[..., :NOPE], kv[..., :NOPE])
    assert torch.equal(value, kv[..., NOPE:])
    flags = {"remove_interleaving": remove_interleaving}
    rotated = oracle(pos.detach(), cos, sin, 0, EMB, sbhd_positions(S, B), **flags)
    for head in range(HEADS):
        assert_rounded_once(key.detach()[..., head : head + 1, NOPE:], rotated)
    dkey = random(*key.shape, dtype=dtype, seed=1)
    dvalue = random(*value.shape, dtype=dtype, seed=2)
    dkv, dpos = torch.autograd.grad((key, value), (kv, pos), (dkey, dvalue))
    assert torch.equal(dkv, torch.cat((dkey[..., :NOPE], dvalue), -1))
    heads_sum = dkey[..., NOPE:].double().sum(-2, keepdim=True)
    exact = oracle(heads_sum, cos, sin, 0, EMB, sbhd_positions(S, B), transposed=True, **flags)
    assert_rounded_once(dpos, exact, scale=HEADS * exact.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_key_alone_equals_the_split(dtype):
    cos, sin = tables(S, EMB)
    kv, pos = random(S, B, HEADS, NOPE, dtype=dtype), random(S, B, 1, EMB, dtype=dtype, grad=True)
    expected, _ = reference.fused_mla_rope_kv_split(kv, pos, cos, sin, EMB, NOPE, 0)
    dkey = random(*expected.shape, dtype=dtype, seed=1)
    (dpos,) = torch.autograd.grad(expected, pos, dkey)
    for ops in (fused, reference):
        key = torch.full_like(expected, float("nan"))
        key[..., :NOPE] = kv
        assert ops.rotate_shared_key_into(key, pos, cos, sin) is key
        assert torch.equal(key, expected)
        assert ulps(ops.shared_key_gradient(dkey, cos, sin), dpos) <= (0 if DEVICE == "cpu" else 64)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_concatenation(ops, dtype, heads):
    cos, sin = tables(S, EMB)
    nope = random(S, B, heads, NOPE, dtype=dtype, grad=True)
    rope = random(S, B, heads, EMB, dtype=dtype, grad=True)
    out = ops.fused_mla_rope_concat(nope, rope, cos, sin)
    assert torch.equal(out[..., :NOPE], nope)
    assert_rounded_once(out.detach()[..., NOPE:], oracle(rope.detach(), cos, sin, 0, EMB, sbhd_positions(S, B)))
    grad = random(*out.shape, dtype=dtype, seed=1)
    dnope, drope = torch.autograd.grad(out, (nope, rope), grad)
    assert torch.equal(dnope, grad[..., :NOPE])
    exact = oracle(grad[..., NOPE:], cos, sin, 0, EMB, sbhd_positions(S, B), transposed=True)
    assert_rounded_once(drope, exact)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_backward_is_the_transpose(flags):
    cos, sin = tables(S, EMB)
    x, y = random(S, B, HEADS, NOPE + EMB), random(S, B, HEADS, NOPE + EMB, seed=1)
    rotated = fused.fused_mla_rope_out_of_place(x, cos, sin, NOPE, EMB, **flags)
    back = fused.mla_rope_unapply_raw(y, cos, sin, NOPE, EMB, **flags)
    left, right = (y.double() * rotated.double()).sum(), (back.double() * x.double()).sum()
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_inverse_after_forward_scales_by_the_square_of_the_magnitude():
    cos, sin = tables(S, EMB)
    cos[..., EMB // 2 :], sin[..., EMB // 2 :] = cos[..., : EMB // 2], sin[..., : EMB // 2]
    x = random(S, B, HEADS, NOPE + EMB)
    flags = {"remove_interleaving": True}
    there = fused.fused_mla_rope_out_of_place(x, cos, sin, NOPE, EMB, **flags)
    back = fused.fused_mla_rope_out_of_place(there, cos, sin, NOPE, EMB, inverse=True, **flags)
    torch.testing.assert_close(back[..., NOPE:], 1.25**2 * x[..., NOPE:], rtol=1e-5, atol=1e-5)


def test_rotation_equals_complex_multiplication():
    angle = torch.arange(S, device=DEVICE, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.05], device=DEVICE)
    cos, sin = (torch.cat((f, f), -1).view(S, 1, 1, EMB).float() for f in (angle.cos(), angle.sin()))
    x = random(S, B, HEADS, EMB)
    pairs = torch.view_as_complex(x.double().view(S, B, HEADS, EMB // 2, 2))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None, None])
    expected = turned.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(
        fused.fused_mla_rope_out_of_place(x, cos, sin, 0, EMB).double(), expected, rtol=1e-6, atol=1e-6
    )


def test_twins_compute_fp64_in_fp64():
    cos, sin = tables(S, EMB, torch.float64)
    t = random(S, B, HEADS, NOPE + EMB, dtype=torch.float64, grad=True)
    exact = oracle(t.detach(), cos, sin, NOPE, EMB, sbhd_positions(S, B))
    out = reference.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB)
    torch.testing.assert_close(out, exact, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: reference.fused_mla_rope_inplace(x * 1.0, cos, sin, NOPE, EMB), t)
    kv, pos = random(2, 1, 3, 4, dtype=torch.float64, grad=True), random(2, 1, 1, 2, dtype=torch.float64, grad=True)
    cos, sin = tables(2, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: reference.fused_mla_rope_kv_split(a, b, cos, sin, 2, 1, 3), (kv, pos))


def test_megatron_names_take_both_spellings():
    cos, sin = tables(S, EMB)
    t = random(S, B, HEADS, NOPE + EMB)
    expected = reference.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB)
    for ops in (fused, reference):
        for_q = ops.fused_apply_mla_rope_for_q
        assert torch.equal(for_q(t.clone(), cos, sin, NOPE, EMB, None, 0, 1, False), expected)
        assert torch.equal(for_q(t.clone(), cos, sin, qk_head_dim=NOPE, emb_dim=EMB), expected)
        assert torch.equal(for_q(t.clone(), cos, sin, nope_dim=NOPE, emb_dim=EMB), expected)
        with pytest.raises(ValueError, match="exactly one of qk_head_dim and nope_dim"):
            for_q(t.clone(), cos, sin, NOPE, EMB, nope_dim=NOPE)
        kv, pos = random(S, B, HEADS, NOPE + 5), random(S, B, 1, EMB)
        both = ops.fused_apply_mla_rope_for_kv(kv, pos, cos, sin, EMB, NOPE, 5, None, 0, 1, False)
        for ours, theirs in zip(both, reference.fused_mla_rope_kv_split(kv, pos, cos, sin, EMB, NOPE, 5), strict=True):
            assert torch.equal(ours, theirs)
