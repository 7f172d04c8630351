"""Any number of heads, any even width, any block: nothing outside a tensor is written and nothing inside is missed.

Every tensor lies in poisoned memory between bands; a masked lane that took part in a sum would bring a NaN.
"""

import pytest
import torch

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from mla_attention.fusions.rope.key_value_launch import launch_key_value
from mla_attention.fusions.rope.raw import launch_query_rope
from tests.fusions.rope.support import DEVICE, DTYPES, random, tables, ulps
from tests.guards import Guarded, guarded, guarded_allocations

HEADS = (1, 3, 5, 6, 12, 20, 66, 96, 112)
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = ((192, 64, 256), (128, 64, 128), (96, 48, 160), (96, 32, 80), (128, 96, 128), (64, 2, 64), (1, 4, 1))
TOKENS = 2
# Sums of the heads in another order differ in fp32; an exact order is what the CPU's twin happens to share.
SUM_ULPS = 64


@pytest.mark.parametrize(("heads", "block"), [(h, b) for h in HEADS for b in BLOCKS if DEVICE == "cuda" or h <= 24 * b])
@pytest.mark.parametrize("transposed", [False, True])
def test_query_touches_its_own_heads_only(heads, block, transposed):
    nope, emb = 3, 4
    cos, sin = tables(TOKENS, emb)
    values = random(TOKENS, 1, heads, nope + emb, dtype=torch.bfloat16)
    twin = reference.mla_rope_unapply_raw if transposed else reference.fused_mla_rope_out_of_place
    expected = twin(values, cos, sin, nope, emb)
    row = nope + emb
    t, guard = guarded(values, stride=(heads * row + 5, heads * row + 5, row, 1))
    launch_query_rope(t, t, cos, sin, None, None, nope, emb, transposed=transposed, block_rows=block, num_warps=1)
    guard.check()
    assert torch.equal(t, expected)
    out = Guarded(tuple(values.shape), values.dtype, DEVICE)
    launch_query_rope(
        values, out.tensor, cos, sin, None, None, nope, emb, transposed=transposed, block_rows=block, num_warps=1
    )
    out.check()
    assert torch.equal(out.tensor, expected)


KEY_VALUE_BLOCKS = [
    (heads, block, (1, 2, 4)[(i + j) % 3])
    for i, heads in enumerate(HEADS)
    for j, block in enumerate((1, 4, 8, 64))
    if DEVICE == "cuda" or heads <= 24 * block
]


@pytest.mark.parametrize(("heads", "block_heads", "block_tokens"), KEY_VALUE_BLOCKS)
@pytest.mark.parametrize("backward", [False, True])
def test_key_value_touches_its_own_heads_only(heads, block_heads, block_tokens, backward):
    k_dim, emb, v_dim = 3, 4, 5
    cos, sin = tables(TOKENS, emb)
    kv = random(TOKENS, 1, heads, k_dim + v_dim, grad=True)
    pos = random(TOKENS, 1, 1, emb, grad=True)
    expected = reference.fused_mla_rope_kv_split(kv, pos, cos, sin, emb, k_dim, v_dim)
    if backward:
        sources = [random(*t.shape, seed=3) for t in expected]
        expected = torch.autograd.grad(expected, (kv, pos), sources)
        shapes = (kv, pos)
    else:
        sources = [kv.detach(), pos.detach()]
        shapes = expected
    inputs = [guarded(t)[0] for t in sources]
    outputs = [Guarded(tuple(t.shape), t.dtype, DEVICE) for t in shapes]
    first, second = (guard.tensor for guard in outputs)
    kv_end, pos_end, key_end, value_end = (first, second, *inputs) if backward else (*inputs, first, second)
    forced = {"block_heads": block_heads, "block_tokens": block_tokens, "num_warps": 1}
    launch_key_value(
        kv_end, pos_end, key_end, value_end, cos, sin, None, None, emb, k_dim, v_dim, backward=backward, **forced
    )
    for guard in outputs:
        guard.check()
    assert torch.equal(first, expected[0])
    if backward:  # a sum of heads: its rounding is one of its terms, which may cancel
        terms = sources[0][..., k_dim:].abs().sum(-2, keepdim=True).max()
        assert (second - expected[1]).abs().max() <= 2.0**-20 * terms
    else:
        assert torch.equal(second, expected[1])


@pytest.mark.parametrize(
    ("heads", "k_dim", "emb", "v_dim", "tokens"),
    [(8, 128, 64, 128, 20), (12, 20, 8, 30, 70), (1, 6, 64, 10, 300), (3, 5, 4, 6, 300), (66, 3, 4, 5, 9)],
)
def test_backward_over_several_groups_of_tokens(heads, k_dim, emb, v_dim, tokens):
    """As launched by default: programs that sum and programs that copy take different numbers of tokens."""
    cos, sin = tables(tokens, emb)
    kv, pos = random(tokens, 1, heads, k_dim + v_dim, grad=True), random(tokens, 1, 1, emb, grad=True)
    found = []
    for ops in (fused, reference):
        outs = ops.fused_mla_rope_kv_split(kv, pos, cos, sin, emb, k_dim, v_dim)
        grads = [random(*o.shape, seed=5) for o in outs]
        found.append((*torch.autograd.grad(outs, (kv, pos), grads), ops.shared_key_gradient(grads[0], cos, sin)))
    (dkv, dpos, alone), (dkv_twin, dpos_twin, _) = found
    assert torch.equal(dkv, dkv_twin)
    assert torch.equal(alone, dpos)
    torch.testing.assert_close(dpos, dpos_twin, rtol=0, atol=2.0**-20 * heads * 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nope", "emb", "v_dim"), WIDTHS)
def test_every_width_in_every_function(nope, emb, v_dim, dtype):
    heads = 3
    cos, sin = tables(TOKENS, emb)
    cases = {
        "fused_mla_rope_inplace": (random(TOKENS, 1, heads, nope + emb, dtype=dtype),),
        "fused_mla_rope_out_of_place": (random(TOKENS, 1, heads, nope + emb, dtype=dtype),),
        "fused_mla_rope_kv_split": (
            random(TOKENS, 1, heads, nope + v_dim, dtype=dtype),
            random(TOKENS, 1, 1, emb, dtype=dtype),
        ),
        "fused_mla_rope_concat": (
            random(TOKENS, 1, heads, nope, dtype=dtype),
            random(TOKENS, 1, heads, emb, dtype=dtype),
        ),
    }
    widths = {
        "fused_mla_rope_kv_split": (emb, nope, v_dim),
        "fused_mla_rope_concat": (),
    }
    for name, values in cases.items():
        results = []
        for ops in (fused, reference):
            inputs = [guarded(v)[0].requires_grad_() for v in values]
            arguments = [t * 1.0 for t in inputs]
            with guarded_allocations():
                out = getattr(ops, name)(*arguments, cos, sin, *widths.get(name, (nope, emb)))
                outs = out if isinstance(out, tuple) else (out,)
                grads = [random(*o.shape, dtype=dtype, seed=5) for o in outs]
                results.append((*outs, *torch.autograd.grad(outs, inputs, grads)))
        for ours, twins in zip(*results, strict=True):
            allowed = 1 if dtype != torch.float32 else SUM_ULPS
            assert torch.equal(ours, twins) or ulps(ours, twins) <= allowed, name


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_unaligned_memory(offset):
    nope, emb, heads = 8, 16, 4
    cos, sin = tables(TOKENS, emb)
    values = random(TOKENS, 1, heads, nope + emb, dtype=torch.bfloat16)
    t, guard = guarded(values, offset=offset)
    fused.mla_rope_apply_raw_(t, cos, sin, nope, emb)
    guard.check()
    assert torch.equal(t, reference.fused_mla_rope_out_of_place(values, cos, sin, nope, emb))
