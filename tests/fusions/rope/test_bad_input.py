"""What is refused before a launch: one line that names the argument, what was given and what is allowed."""

import os
import subprocess
import sys

import pytest
import torch

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from tests.fusions.rope.support import DEVICE, random, tables

S, B, HEADS, NOPE, EMB, V = 3, 2, 2, 2, 4, 5
OPS = pytest.mark.parametrize("ops", [fused, reference], ids=["fused", "twin"])


def query(ops, name="fused_mla_rope_inplace", **changes):
    cos, sin = tables(S, EMB)
    arguments = {"t": random(S, B, HEADS, NOPE + EMB), "cos": cos, "sin": sin, "nope_dim": NOPE, "emb_dim": EMB}
    return getattr(ops, name)(**(arguments | changes))


def split(ops, **changes):
    cos, sin = tables(S, EMB)
    arguments = {"kv": random(S, B, HEADS, NOPE + V), "k_pos_emb": random(S, B, 1, EMB), "cos": cos, "sin": sin}
    return ops.fused_mla_rope_kv_split(**(arguments | {"emb_dim": EMB, "k_dim": NOPE, "v_dim": V} | changes))


def concat(ops, **changes):
    cos, sin = tables(S, EMB)
    arguments = {"nope": random(S, B, HEADS, NOPE), "rope": random(S, B, HEADS, EMB), "cos": cos, "sin": sin}
    return ops.fused_mla_rope_concat(**(arguments | changes))


def cu(*offsets: int, dtype=torch.int32):
    return torch.tensor(offsets, dtype=dtype, device=DEVICE)


def packed(tokens=4, **changes):
    cos, sin = tables(tokens, EMB)
    t = random(tokens, HEADS, NOPE + EMB)
    return {"t": t, "cos": cos, "sin": sin, "cu_seqlens_q": cu(0, tokens)} | changes


def cos_of(width=EMB, rows=S, dtype=torch.float32):
    return tables(rows, width, dtype)[0]


BAD_QUERIES = [
    ({"emb_dim": 3, "nope_dim": 3}, "emb_dim must be an even number of at least 2.*got 3"),
    ({"emb_dim": 0, "nope_dim": 6}, "emb_dim must be an even number of at least 2.*got 0"),
    ({"nope_dim": -2, "emb_dim": 8}, "nope_dim must not be negative, got -2"),
    ({"rotary_interleaved": True}, "rotary_interleaved must be False, got True"),
    ({"remove_interleaving": True, "input_halves": True}, "input_halves=True excludes remove_interleaving=True"),
    ({"nope_dim": 3}, r"t must be 7 wide \(nope_dim 3 \+ emb_dim 4\), got 6"),
    ({"cos": cos_of(2), "sin": cos_of(2)}, r"cos must be \[positions, 1, 1, emb_dim=4\], got shape \(3, 1, 1, 2\)"),
    ({"cos": cos_of(8), "sin": cos_of(8)}, r"cos must be \[positions, 1, 1, emb_dim=4\], got shape \(3, 1, 1, 8\)"),
    ({"sin": cos_of(2)}, r"sin must be \[positions, 1, 1, emb_dim=4\], got shape \(3, 1, 1, 2\)"),
    ({"cos": cos_of(rows=2), "sin": cos_of(rows=2)}, "cos must hold at least 3 positions, got 2"),
    ({"sin": cos_of(rows=4)}, r"sin must have the shape of cos .*got \(4, 1, 1, 4\)"),
    ({"sin": cos_of(dtype=torch.bfloat16)}, "sin must have the dtype of cos .*float32.*got torch.bfloat16"),
    ({"cos": cos_of().int()}, "cos must be a floating-point table, got torch.int32"),
    ({"cos": cos_of().expand(S, 1, 2, EMB)}, r"cos must be \[positions, 1, 1, emb_dim=4\], got shape"),
    ({"cos": cos_of()[0, 0, 0]}, r"cos must be \[positions, 1, 1, emb_dim=4\], got shape \(4,\)"),
    ({"t": random(S, B, HEADS, NOPE + EMB).long()}, "t must be .*got torch.int64"),
    ({"t": random(S, HEADS, NOPE + EMB)}, r"t must be \[S, B, n, d\] without cu_seqlens_q, got shape \(3, 2, 6\)"),
    ({"cu_seqlens_q": cu(0, S)}, r"t must be \[T, n, d\] with cu_seqlens_q, got shape \(3, 2, 2, 6\)"),
    (packed(cu_seqlens_q=cu(0, 4).view(1, 2)), r"cu_seqlens_q must be 1-D, got shape \(1, 2\)"),
    (packed(cu_seqlens_q=cu(0, 4).float()), "cu_seqlens_q must be int32 or int64, got torch.float32"),
    (packed(cu_seqlens_q=cu(0, 4).short()), "cu_seqlens_q must be int32 or int64, got torch.int16"),
    (packed(cu_seqlens_q=cu()), "cu_seqlens_q must hold at least the offset 0"),
    (packed(cp_rank=2, cp_size=2), r"cp_rank must lie in \[0, cp_size=2\), got 2"),
    (packed(cp_rank=-1), r"cp_rank must lie in \[0, cp_size=1\), got -1"),
    ({"cp_size": 0}, "cp_size must be at least 1, got 0"),
    ({"cp_rank": 1}, r"cp_rank must lie in \[0, cp_size=1\), got 1"),
    ({"position_ids": cu(0, 1)}, r"position_ids must be \[3\] or \[6\], got shape \(2,\)"),
    (packed(position_ids=cu(0, 1)), r"position_ids must be \[4\], got shape \(2,\)"),
    ({"position_ids": cu(0, 1, 2).view(1, 3)}, r"position_ids must be 1-D, got shape \(1, 3\)"),
    ({"position_ids": cu(0, 1, 2).float()}, "position_ids must be int32 or int64, got torch.float32"),
]


@OPS
@pytest.mark.parametrize(("changes", "message"), BAD_QUERIES, ids=[m for _, m in BAD_QUERIES])
def test_query(ops, changes, message):
    for name in ("fused_mla_rope_inplace", "fused_mla_rope_out_of_place", "mla_rope_apply_raw_"):
        if name.endswith("raw_") and "rotary_interleaved" in changes:
            continue
        with pytest.raises(ValueError, match=message) as caught:
            query(ops, name, **changes)
        assert "\n" not in str(caught.value)


BAD_SPLITS = [
    ({"emb_dim": 5}, "emb_dim must be an even number"),
    ({"k_dim": 3}, r"kv must be 8 wide \(k_dim 3 \+ v_dim 5\), got 7"),
    ({"v_dim": -1}, "v_dim must not be negative, got -1"),
    ({"k_pos_emb": random(S, B, 2, EMB)}, "k_pos_emb must have the leading dimensions of one head of kv"),
    ({"k_pos_emb": random(S + 1, B, 1, EMB)}, "k_pos_emb must have the leading dimensions of one head of kv"),
    ({"k_pos_emb": random(S, B, 1, 6)}, r"k_pos_emb must be 4 wide \(emb_dim\), got 6"),
    ({"k_pos_emb": random(S, B, 1, EMB).half()}, "k_pos_emb must have the dtype of kv .*got torch.float16"),
    ({"rotary_interleaved": True}, "rotary_interleaved must be False"),
    ({"cu_seqlens_kv": cu(0, S)}, r"kv must be \[T, n, d\] with cu_seqlens_kv"),
]


@OPS
@pytest.mark.parametrize(("changes", "message"), BAD_SPLITS, ids=[m for _, m in BAD_SPLITS])
def test_key_value_split(ops, changes, message):
    with pytest.raises(ValueError, match=message):
        split(ops, **changes)


@OPS
def test_concatenation(ops):
    with pytest.raises(ValueError, match=r"emb_dim must be an even number of at least 2.*got 3"):
        concat(ops, rope=random(S, B, HEADS, 3))
    with pytest.raises(ValueError, match="nope must have the leading dimensions of rope"):
        concat(ops, nope=random(S, B, 1, NOPE))
    with pytest.raises(ValueError, match="rope must have the dtype of nope"):
        concat(ops, nope=random(S, B, HEADS, NOPE).half())
    with pytest.raises(ValueError, match="cos must hold at least 3 positions, got 2"):
        concat(ops, cos=cos_of(rows=2), sin=cos_of(rows=2))


@OPS
def test_out(ops):
    t, (cos, sin) = random(S, B, HEADS, NOPE + EMB), tables(S, EMB)
    wide = random(S, B, HEADS, 2 * (NOPE + EMB))
    for out, message in (
        (random(S, B, HEADS, NOPE), "out must be .*like t"),
        (t.half(), "out must be .*like t"),
        (t[:1].expand(S, B, HEADS, NOPE + EMB), "out must not be expanded"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.mla_rope_unapply_raw(t, cos, sin, NOPE, EMB, out=out)
    with pytest.raises(ValueError, match="out must be t itself, or share no element"):
        ops.mla_rope_unapply_raw(wide[..., :6], cos, sin, NOPE, EMB, out=wide[..., 3:9])
    apart = ops.mla_rope_unapply_raw(wide[..., :6], cos, sin, NOPE, EMB, out=wide[..., 6:])
    assert torch.equal(apart, reference.mla_rope_unapply_raw(wide[..., :6].clone(), cos, sin, NOPE, EMB))


def test_kernels_refuse_what_only_twins_can():
    with pytest.raises(ValueError, match=r"t must be float16, bfloat16 or float32 for the fused kernel, got .*64"):
        query(fused, t=random(S, B, HEADS, NOPE + EMB).double())
    with pytest.raises(ValueError, match="kv must be float16, bfloat16 or float32"):
        split(fused, kv=random(S, B, HEADS, NOPE + V).double(), k_pos_emb=random(S, B, 1, EMB).double())
    with pytest.raises(ValueError, match=r"t must be contiguous in its last dimension \(stride 1\), got stride 2"):
        query(fused, t=random(S, B, HEADS, 2 * (NOPE + EMB))[..., ::2])
    with pytest.raises(ValueError, match="cos must be contiguous in its last dimension, got stride 2"):
        query(fused, cos=cos_of(2 * EMB)[..., ::2])
    with pytest.raises(ValueError, match="cos must not require grad"):
        query(fused, cos=cos_of().requires_grad_())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs two kinds of device")
def test_devices_must_agree():
    with pytest.raises(ValueError, match="cos must be on the device of the rotated tensor"):
        query(fused, cos=cos_of().cpu())
    with pytest.raises(ValueError, match="position_ids must be on the device of the rotated tensor"):
        query(fused, position_ids=cu(0, 1, 2).cpu())


BAD_VALUES = [
    (packed(cu_seqlens_q=cu(1, 4)), "cu_seqlens_q must start at 0 and never fall"),
    (packed(cu_seqlens_q=cu(0, 3, 2)), "cu_seqlens_q must start at 0 and never fall"),
    (packed(cu_seqlens_q=cu(0, 5)), r"cu_seqlens_q must end at most at cp_size \* T = 4, got 5"),
    (packed(cos=cos_of(rows=3), sin=cos_of(rows=3)), r"cos must hold a position for the longest sequence \(4\), got 3"),
    ({"position_ids": cu(0, 3, 1)}, r"position_ids must lie in \[0, 3\), got values from 0 to 3"),
    ({"position_ids": cu(0, -1, 1)}, r"position_ids must lie in \[0, 3\), got values from -1 to 1"),
]


@OPS
@pytest.mark.parametrize(("changes", "message"), BAD_VALUES, ids=[m for _, m in BAD_VALUES])
def test_values_are_checked_on_request(ops, changes, message, monkeypatch):
    monkeypatch.setenv("MLA_ATTENTION_VALIDATE", "1")
    query(ops)
    query(ops, **packed())
    with pytest.raises(ValueError, match=message):
        query(ops, **changes)


CPU_CALLS = """
import torch
import mla_attention.fusions as fused
t, kv, pos, table = (torch.zeros(2, 1, n, d) for n, d in ((2, 6), (2, 7), (1, 4), (1, 4)))
calls = {
    "fused_mla_rope_inplace": (t, table, table, 2, 4),
    "fused_mla_rope_out_of_place": (t, table, table, 2, 4),
    "mla_rope_apply_raw_": (t, table, table, 2, 4),
    "mla_rope_unapply_raw": (t, table, table, 2, 4),
    "fused_mla_rope_kv_split": (kv, pos, table, table, 4, 2, 5),
    "fused_mla_rope_concat": (t[..., :2], t[..., 2:], table, table),
    "rotate_shared_key_into": (t, pos, table, table),
    "shared_key_gradient": (t, table, table),
}
for name, arguments in calls.items():
    try:
        getattr(fused, name)(*arguments)
    except RuntimeError as error:
        assert f"use mla_attention.fusions.reference.{name}" in str(error), error
        assert "CPU tensor" in str(error) and "\\n" not in str(error), error
    else:
        raise SystemExit(f"{name} ran on the CPU")
try:
    fused.fused_mla_rope_inplace(t, table, table, 3, 3)
except ValueError as error:
    assert "emb_dim" in str(error)
assert not t.any()
"""


def test_cpu_tensors_without_the_interpreter_name_the_twin():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CPU_CALLS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


def test_without_triton_the_twins_work_and_the_kernels_say_so():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "import mla_attention.fusions as fused\n"
        "from mla_attention.fusions import reference\n"
        "t, table = torch.zeros(2, 1, 2, 6), torch.zeros(2, 1, 1, 4)\n"
        "reference.fused_mla_rope_inplace(t, table, table, 2, 4)\n"
        "try:\n"
        "    fused.fused_mla_rope_inplace\n"
        "except RuntimeError as error:\n"
        "    assert 'use mla_attention.fusions.reference.fused_mla_rope_inplace' in str(error)\n"
        "else:\n"
        "    raise SystemExit('imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_names_of_the_package():
    import inspect

    assert set(fused.__all__) == set(reference.__all__)
    with pytest.raises(AttributeError, match="no_such_kernel"):
        _ = fused.no_such_kernel
    for name in fused.__all__:
        if "rope" in name or "shared_key" in name:
            ours, twins = (inspect.signature(getattr(ops, name)) for ops in (fused, reference))
            assert ours == twins, name
