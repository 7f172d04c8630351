"""Registered operators: schema, fake, torch.compile with whole graphs and changing shapes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from mla_attention.fusions.rope import concat, kv_split, raw, shared_key
from tests.fusions.rope.support import DEVICE, random, tables

S, B, HEADS, NOPE, EMB, V = 4, 2, 3, 2, 4, 5
BACKENDS = ["aot_eager"] if DEVICE == "cpu" else ["aot_eager", "inductor"]
COS, SIN = tables(16, EMB)


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()


def test_opcheck():
    t, kv, pos = random(S, B, HEADS, NOPE + EMB), random(S, B, HEADS, NOPE + V), random(S, B, 1, EMB)
    cu = torch.tensor([0, 3, 4], device=DEVICE)
    flags = (False, False, False, False, False)
    query = (COS, SIN, None, None, NOPE, EMB, 0, 1, *flags)
    packed = (COS, SIN, cu, None, NOPE, EMB, 0, 1, *flags)
    widths = (COS, SIN, None, None, EMB, NOPE, V, 0, 1, False)
    positions = (COS, SIN, None, None, 0, 1)
    calls = [
        (raw.rope_inplace, (t.clone(), *query)),
        (raw.rope_inplace, (t[:, 0].clone(), *packed)),
        (raw.rope_into, (t, torch.empty_like(t), *query)),
        (raw.rope_new, (t, *query)),
        (raw.rope_new, (t.transpose(0, 1), *query)),
        (kv_split.kv_split, (kv, pos, *widths)),
        (kv_split.kv_split_backward, (t, random(S, B, HEADS, V), *widths)),
        (concat.concat, (t[..., :NOPE], t[..., NOPE:], *positions)),
        (concat.concat_backward, (t, *positions)),
        (shared_key.shared_key_into, (t.clone(), pos, *positions, False)),
        (shared_key.shared_key_backward, (t, *positions, False)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments)


def model(ops, x, kv, pos, cu, position_ids):
    """All functions in one differentiable graph, on tensors and on views."""
    shape = x.shape
    doubled = ops.fused_mla_rope_inplace(x * 2, COS, SIN, NOPE, EMB, cu, position_ids=position_ids)
    flat = (x * 3).flatten(-2)
    view = ops.fused_mla_rope_inplace(flat.view(shape), COS, SIN, NOPE, EMB, cu, inverse=True)
    copied = ops.fused_mla_rope_out_of_place(x, COS, SIN, NOPE, EMB, cu, rope_first=True)
    key, value = ops.fused_mla_rope_kv_split(kv, pos, COS, SIN, EMB, NOPE, V, cu)
    joined = ops.fused_mla_rope_concat(x[..., :NOPE], x[..., NOPE:], COS, SIN, cu)
    return doubled, view * 2, copied, key, value, joined


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_equals_eager(backend, packed):
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    tokens = (S,) if packed else (S, B)
    cu = torch.tensor([0, 1, S], device=DEVICE) if packed else None
    ids = torch.tensor([3, 1, 0, 2], device=DEVICE)
    results = []
    for ops, function in ((fused, compiled), (fused, model), (reference, model)):
        x = random(*tokens, HEADS, NOPE + EMB, grad=True)
        kv, pos = random(*tokens, HEADS, NOPE + V, grad=True), random(*tokens, 1, EMB, grad=True)
        outs = function(ops, x, kv, pos, cu, ids)
        grads = torch.autograd.grad(outs, (x, kv, pos), [random(*o.shape, seed=3) for o in outs])
        results.append((*outs, *grads))
    for got, eager, twin in zip(*results, strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got, twin, rtol=1e-5, atol=1e-5)


def test_compiled_in_place_changes_the_argument():
    def rotate(t):
        return fused.fused_mla_rope_inplace(t, COS, SIN, NOPE, EMB)

    t = random(S, B, HEADS, NOPE + EMB)
    expected = reference.fused_mla_rope_out_of_place(t, COS, SIN, NOPE, EMB)
    out = torch.compile(rotate, fullgraph=True, backend="aot_eager")(t)
    assert torch.equal(out, expected)
    assert torch.equal(t, expected)


def test_dynamic_shapes_compile_once():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (10, 11, 13, 15, 16):  # (the first differs from all widths: torch takes equal sizes for one symbol)
        x = random(tokens, B, HEADS, NOPE + EMB, grad=True)
        kv, pos = random(tokens, B, HEADS, NOPE + V), random(tokens, B, 1, EMB)
        outs = compiled(fused, x, kv, pos, None, None)
        for got, twin in zip(outs, model(reference, x, kv, pos, None, None), strict=True):
            torch.testing.assert_close(got, twin, rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1


def test_fakes_know_shapes_without_data():
    meta = torch.empty(S, B, HEADS, NOPE + EMB, device="meta")
    table = torch.empty(S, 1, 1, EMB, device="meta")
    assert fused.fused_mla_rope_out_of_place(meta, table, table, NOPE, EMB).shape == meta.shape
    assert fused.fused_mla_rope_inplace(meta, table, table, NOPE, EMB) is meta
    kv = torch.empty(S, B, HEADS, NOPE + V, device="meta")
    key, value = fused.fused_mla_rope_kv_split(kv, meta[:, :, :1, NOPE:], table, table, EMB, NOPE, V)
    assert key.shape == (S, B, HEADS, NOPE + EMB)
    assert value.shape == (S, B, HEADS, V)
    assert fused.fused_mla_rope_concat(meta, meta[..., NOPE:], table, table).shape[-1] == NOPE + 2 * EMB
    assert fused.shared_key_gradient(key, table, table).shape == (S, B, 1, EMB)
