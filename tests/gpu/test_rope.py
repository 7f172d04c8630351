"""What only a GPU can show of the rotary kernels. `tests/fusions/rope` runs on it too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from tests.fusions.rope.support import ulps

REPOSITORY = Path(__file__).parents[2]
GLM5 = (64, 192, 64, 256)
DEEPSEEK_V3 = (128, 128, 64, 128)
INDEXER_KEY = (1, 64, 64, 64)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def tables(positions: int, emb_dim: int) -> tuple[Tensor, Tensor]:
    frequency = 1e4 ** (-torch.arange(0, emb_dim, 2, device="cuda", dtype=torch.float64) / emb_dim)
    angle = torch.outer(torch.arange(positions, device="cuda", dtype=torch.float64), frequency)
    angle = torch.cat((angle, angle), -1).view(positions, 1, 1, emb_dim)
    return angle.cos().float(), angle.sin().float()


def short_sequences(tokens: int, count: int = 64) -> Tensor:
    """Offsets of `count` sequences of many lengths, some of them empty."""
    cuts = torch.randint(0, tokens + 1, (count - 1,), generator=torch.Generator().manual_seed(3)).sort().values
    if count > 2:
        cuts[count // 2] = cuts[count // 2 - 1]
    return torch.tensor([0, *cuts.tolist(), tokens], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("launch", [None, (1, 4), (2, 4), (2, 8), (8, 8), (32, 8), (128, 8)], ids=str)
@pytest.mark.parametrize(("heads", "nope", "emb"), [(64, 192, 64), (8, 192, 64), (12, 64, 128), (1, 64, 64)])
def test_thousands_of_exact_permutations(heads, nope, emb, launch):
    """cos 1 and sin 0 move channels and change none: any race between warps shows as a wrong bit."""
    from mla_attention.fusions.rope.raw import launch_query_rope

    tokens, times = 1024, 1000
    cu = short_sequences(tokens)
    cos, sin = torch.ones(tokens, 1, 1, emb, device="cuda"), torch.zeros(tokens, 1, 1, emb, device="cuda")
    original = random(tokens, heads, nope + emb)
    permuted = torch.cat((original[..., :nope], original[..., nope::2], original[..., nope + 1 :: 2]), -1)
    forced = {} if launch is None else {"block_rows": launch[0], "num_warps": launch[1]}
    t = original.clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        launch_query_rope(t, t, cos, sin, cu, None, nope, emb, **forced)
        wrong += (t != permuted).sum()
        launch_query_rope(t, t, cos, sin, cu, None, nope, emb, transposed=True, **forced)
        wrong += (t != original).sum()
    assert wrong.item() == 0


def everything(ops, shape, lead, cu, seed=0) -> list[Tensor]:
    """All functions forward and backward; outputs, then gradients."""
    heads, k_dim, emb, v_dim = shape
    cos, sin = tables(lead[0], emb)
    query, kv = random(*lead, heads, k_dim + emb, seed=seed), random(*lead, heads, k_dim + v_dim, seed=seed + 1)
    pos = random(*lead, 1, emb, seed=seed + 2)
    inputs = [t.requires_grad_() for t in (query, kv, pos)]
    outs = (
        ops.fused_mla_rope_inplace(query * 1, cos, sin, k_dim, emb, cu),
        ops.fused_mla_rope_out_of_place(query, cos, sin, k_dim, emb, cu, rope_first=True),
        *ops.fused_mla_rope_kv_split(kv, pos, cos, sin, emb, k_dim, v_dim, cu),
        ops.fused_mla_rope_concat(query[..., :k_dim], query[..., k_dim:], cos, sin, cu),
    )
    weights = [random(*o.shape, seed=seed + 9) for o in outs]
    return [*outs, *torch.autograd.grad(outs, inputs, weights)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [GLM5, DEEPSEEK_V3, INDEXER_KEY, (8, 192, 64, 256), (20, 96, 48, 160)], ids=str)
def test_full_size_equals_the_twin(shape, packed):
    lead = (2048,) if packed else (1024, 2)
    cu = short_sequences(2048) if packed else None
    for ours, twins in zip(everything(fused, shape, lead, cu), everything(reference, shape, lead, cu), strict=True):
        if not torch.equal(ours, twins):  # gradients that several functions add, and sums over heads
            torch.testing.assert_close(ours, twins, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("shape", [GLM5, DEEPSEEK_V3], ids=str)
def test_forward_is_the_twins_bit_for_bit_and_the_key_gradient_within_one_ulp(shape):
    heads, k_dim, emb, v_dim = shape
    cos, sin = tables(1024, emb)
    kv, pos = random(1024, 1, heads, k_dim + v_dim), random(1024, 1, 1, emb, seed=1).requires_grad_()
    found = []
    for ops in (fused, reference):
        key, value = ops.fused_mla_rope_kv_split(kv, pos, cos, sin, emb, k_dim, v_dim)
        found.append((key, value, torch.autograd.grad(key, pos, random(*key.shape, seed=2))[0]))
    ours, twins = found
    assert torch.equal(ours[0], twins[0])
    assert torch.equal(ours[1], twins[1])
    large = twins[2].abs() > 2.0**-8 * twins[2].abs().max()  # a sum that cancels keeps the fp32 error of its terms
    assert ulps(torch.where(large, ours[2], 0), torch.where(large, twins[2], 0)) <= 1


def test_more_than_2_31_elements():
    """A query of 128 x 192 wraps 32-bit offsets at 87,382 tokens; rows behind that are compared one by one."""
    heads, nope, emb, tokens = 128, 128, 64, 90_000
    cu = torch.tensor([0, tokens], device="cuda")
    cos, sin = tables(tokens, emb)
    t = torch.empty(tokens, heads, nope + emb, dtype=torch.bfloat16, device="cuda").normal_()
    rows = torch.tensor([0, 1, 43_690, 43_691, 87_380, 87_381, 87_382, 87_383, tokens - 1], device="cuda")
    expected = reference.fused_mla_rope_out_of_place(t[rows], cos, sin, nope, emb, cu, position_ids=rows)
    out = fused.fused_mla_rope_out_of_place(t, cos, sin, nope, emb, cu)
    assert torch.equal(out[rows], expected)
    del out
    fused.mla_rope_apply_raw_(t, cos, sin, nope, emb, cu)
    assert torch.equal(t[rows], expected)


@pytest.mark.parametrize("packed", [False, True])
def test_graph_capture(packed):
    lead = (512,) if packed else (256, 2)
    cu = torch.tensor([0, 100, 100, 500], device="cuda") if packed else None
    heads, k_dim, emb, v_dim = GLM5
    cos, sin = tables(512, emb)
    inputs = [
        random(*lead, heads, k_dim + emb).requires_grad_(),
        random(*lead, heads, k_dim + v_dim, seed=1).requires_grad_(),
        random(*lead, 1, emb, seed=2).requires_grad_(),
    ]

    def step(ops) -> list[Tensor]:
        query, kv, pos = inputs
        rotated = ops.fused_mla_rope_inplace(query * 1, cos, sin, k_dim, emb, cu)
        key, value = ops.fused_mla_rope_kv_split(kv, pos, cos, sin, emb, k_dim, v_dim, cu)
        loss = (rotated.float() * key.float()).sum() + value.float().square().sum()
        return [rotated, key, value, *torch.autograd.grad(loss, inputs)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(fused)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(fused)
    for seed in (5, 6):
        for i, t in enumerate(inputs):
            t.data.copy_(random(*t.shape, seed=seed + i))
        if cu is not None:
            cu.copy_(torch.tensor([0, 7 * seed, 300, 512], device="cuda"))
        graph.replay()
        for got, eager, twin in zip(captured, step(fused), step(reference), strict=True):
            assert torch.equal(got, eager)
            torch.testing.assert_close(got, twin, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("packed", [False, True])
def test_no_call_waits_for_the_device(packed):
    lead = (512,) if packed else (256, 2)
    cu = short_sequences(512) if packed else None
    heads, k_dim, emb, v_dim = GLM5
    cos, sin = tables(512, emb)
    query, kv = random(*lead, heads, k_dim + emb).requires_grad_(), random(*lead, heads, k_dim + v_dim).requires_grad_()
    pos = random(*lead, 1, emb).requires_grad_()
    ids = torch.arange(lead[0], device="cuda")

    def step() -> None:
        outs = (
            fused.fused_mla_rope_inplace(query * 1, cos, sin, k_dim, emb, cu),
            fused.fused_mla_rope_out_of_place(query, cos, sin, k_dim, emb, cu, position_ids=ids),
            *fused.fused_mla_rope_kv_split(kv, pos, cos, sin, emb, k_dim, v_dim, cu),
            fused.fused_mla_rope_concat(query[..., :k_dim], query[..., k_dim:], cos, sin, cu),
        )
        torch.autograd.grad(outs, (query, kv, pos), [torch.ones_like(o) for o in outs])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_gradient_of_attention_is_rotated_where_it_lies(monkeypatch):
    """What scaled dot product attention hands back is nobody else's, so backward moves the rotary slice alone."""
    from mla_attention.fusions.rope import inplace

    heads, nope, emb = 8, 64, 64
    cos, sin = tables(256, emb)
    x, key = random(256, 1, heads * (nope + emb)), random(256, 1, heads, nope + emb, seed=1)
    calls = []
    shipped = inplace.rope_inplace
    monkeypatch.setattr(inplace, "rope_inplace", lambda t, *rest: (calls.append(rest[-1]), shipped(t, *rest))[1])
    gradients = []
    for ops in (fused, reference):
        leaf = x.detach().requires_grad_()
        query = ops.fused_mla_rope_inplace((leaf * 1).view(256, 1, heads, nope + emb), cos, sin, nope, emb)
        q, k = (t.permute(1, 2, 0, 3) for t in (query, key))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        out.float().square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=2**-6, atol=2**-6)
    assert calls == [False, True]


def test_no_compilation_over_30_token_counts():
    from mla_attention.fusions.rope.rows import rope_rows_kernel

    heads, nope, emb = 6, 24, 16
    cos, sin = tables(4096, emb)

    def call(tokens: int) -> None:
        cu = short_sequences(tokens, 1 + tokens % 9)
        query = random(tokens, heads, nope + emb).requires_grad_()
        fused.fused_mla_rope_inplace(query * 1, cos, sin, nope, emb, cu).float().square().sum().backward()
        query = random(tokens, 1, heads, nope + emb).requires_grad_()
        fused.fused_mla_rope_inplace(query * 1, cos, sin, nope, emb).float().square().sum().backward()

    def compiled() -> int:
        return sum(len(cache[0]) for cache in rope_rows_kernel.device_caches.values())

    call(64)
    before = compiled()
    counts = [*range(1, 18), 31, 32, 33, 48, 64, 100, 128, 255, 256, 1000, 1024, 4095, 4096]
    for tokens in counts:
        call(tokens)
    assert len(counts) == 30
    assert compiled() == before


def run(*command: str, **env: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=os.environ | env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_one_hash_over_five_processes(tmp_path):
    hashes = {run("-m", "tests.gpu.rope_hash", TRITON_CACHE_DIR=str(tmp_path / str(i // 2))) for i in range(5)}
    assert len(hashes) == 1


FIRST_CALL = """
import time, torch
x = torch.randn(4096, 1, 64, 256, device="cuda", dtype=torch.bfloat16)
table = torch.rand(4096, 1, 1, 64, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
import mla_attention.fusions as fused
fused.fused_mla_rope_inplace(x, table, table, 192, 64)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def test_first_call_with_a_cold_cache(tmp_path):
    seconds = float(run("-c", FIRST_CALL, TRITON_CACHE_DIR=str(tmp_path)))
    assert seconds <= 2.0
