"""Which table row a token gets: sbhd, packed, context parallel, explicit positions, padding."""

import pytest
import torch

import mla_attention.fusions as fused
from mla_attention.fusions import reference
from mla_attention.fusions.rope.positions_reference import packed_positions
from mla_attention.fusions.rope.raw import launch_query_rope
from tests.fusions.rope.support import DEVICE, oracle, random, tables

HEADS, NOPE, EMB = 2, 1, 4


def offsets(*lengths: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(dtype)


def chunked(lengths: tuple[int, ...], cp_rank: int, cp_size: int) -> list[int]:
    """The zigzag written out: rank r holds chunks r and 2*size-1-r of every sequence."""
    found = []
    for length in lengths:
        chunk = length // (2 * cp_size)
        for part in (cp_rank, 2 * cp_size - 1 - cp_rank):
            found += range(part * chunk, (part + 1) * chunk)
    return found


def check(positions: list[int], table_length: int, **arguments: object) -> None:
    """Fused and twin use these positions, forward and backward, for 3-D input."""
    cos, sin = tables(table_length, EMB)
    rows = torch.tensor(positions, device=DEVICE)
    t = random(len(positions), HEADS, NOPE + EMB, grad=True)
    exact = oracle(t.detach(), cos, sin, NOPE, EMB, rows)
    grad = random(*t.shape, seed=1)
    exact_grad = oracle(grad, cos, sin, NOPE, EMB, rows, transposed=True)
    kv, pos = random(len(positions), HEADS, 3), random(len(positions), 1, EMB)
    exact_pos = oracle(pos, cos, sin, 0, EMB, rows)
    renamed = {("cu_seqlens" if k.startswith("cu_") else k): v for k, v in arguments.items()}
    for_kv = {("cu_seqlens_kv" if k.startswith("cu_") else k): v for k, v in arguments.items()}
    for ops in (fused, reference):
        out = ops.fused_mla_rope_inplace(t * 1.0, cos, sin, NOPE, EMB, **arguments)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
        (dt,) = torch.autograd.grad(out, t, grad)
        torch.testing.assert_close(dt.double(), exact_grad, rtol=1e-5, atol=1e-6)
        key, _ = ops.fused_mla_rope_kv_split(kv, pos, cos, sin, EMB, 1, 2, **for_kv)
        torch.testing.assert_close(key[:, :1, 1:].double(), exact_pos, rtol=1e-5, atol=1e-6)
        joined = ops.fused_mla_rope_concat(kv[:, :1], pos, cos, sin, **renamed)
        torch.testing.assert_close(joined[..., 3:].double(), exact_pos, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_zigzag_of_lengths_8_and_16_over_2_ranks(dtype):
    expected = (
        [0, 1, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15],
        [2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10, 11],
    )
    for rank, positions in enumerate(expected):
        cu = offsets(8, 16, dtype=dtype)
        assert packed_positions(cu, 12, rank, 2).tolist() == positions
        check(positions, 16, cu_seqlens_q=cu, cp_rank=rank, cp_size=2)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_rank_of_lengths_8_16_24(cp_size):
    lengths = (8, 16, 24)
    for rank in range(cp_size):
        positions = chunked(lengths, rank, cp_size)
        assert packed_positions(offsets(*lengths), 48 // cp_size, rank, cp_size).tolist() == positions
        check(positions, 24, cu_seqlens_q=offsets(*lengths), cp_rank=rank, cp_size=cp_size)


def test_odd_local_lengths_partition_the_sequence():
    ranks = [packed_positions(offsets(10), 5, rank, 2).tolist() for rank in range(2)]
    assert ranks == [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]
    for rank, positions in enumerate(ranks):
        check(positions, 10, cu_seqlens_q=offsets(10), cp_rank=rank, cp_size=2)


@pytest.mark.parametrize(
    "lengths",
    [(1,), (5,), (0, 3), (3, 0), (0, 0, 2, 0, 1, 0), (1,) * 7, (2, 1, 4, 0, 3, 1, 1, 2), (1,) * 16, (1,) * 17],
    ids=str,
)
def test_binary_search_finds_every_sequence(lengths):
    positions = [p for length in lengths for p in range(length)]
    check(positions, max(lengths), cu_seqlens_q=offsets(*lengths))


@pytest.mark.parametrize("count", [127, 128, 129, 300, 1000])
def test_binary_search_over_many_sequences(count):
    lengths = [(0, 1, 2, 1)[i % 4] for i in range(count)]
    check([p for length in lengths for p in range(length)], 2, cu_seqlens_q=offsets(*lengths))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_rows_past_the_last_offset_use_position_0(cp_size):
    positions = [*chunked((4, 8), 0, cp_size), 0, 0, 0]
    check(positions, 8, cu_seqlens_q=offsets(4, 8), cp_size=cp_size)
    check([0, 0], 1, cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=DEVICE), cp_size=cp_size)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_ids_override_the_offsets(dtype):
    ids = torch.tensor([3, 0, 2, 2, 1], dtype=dtype, device=DEVICE)
    check(ids.tolist(), 4, position_ids=ids, cu_seqlens_q=offsets(2, 3), cp_rank=1, cp_size=2)
    check(ids.tolist(), 4, position_ids=ids)


@pytest.mark.parametrize("per_sequence", [True, False])
def test_position_ids_of_sbhd(per_sequence):
    s, b = 3, 2
    cos, sin = tables(5, EMB)
    ids = torch.tensor([4, 0, 2] if per_sequence else [4, 0, 2, 2, 1, 3], device=DEVICE)
    rows = ids[:, None].expand(s, b) if per_sequence else ids.view(s, b)
    t = random(s, b, HEADS, NOPE + EMB)
    exact = oracle(t, cos, sin, NOPE, EMB, rows)
    kv, pos = random(s, b, HEADS, 3), random(s, b, 1, EMB)
    for ops in (fused, reference):
        out = ops.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB, position_ids=ids)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
        key, _ = ops.fused_mla_rope_kv_split(kv, pos, cos, sin, EMB, 1, 2, position_ids=ids)
        torch.testing.assert_close(
            key[:, :, :1, 1:].double(), oracle(pos, cos, sin, 0, EMB, rows), rtol=1e-5, atol=1e-6
        )


def test_context_parallel_sbhd_uses_the_table_as_given():
    cos, sin = tables(3, EMB)
    t = random(3, 2, HEADS, NOPE + EMB)
    plain = fused.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB)
    assert torch.equal(fused.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB, None, 1, 2), plain)


def test_a_position_outside_the_table_gives_nan_there_and_nowhere_else():
    cos, sin = tables(4, EMB)
    t = random(4, HEADS, NOPE + EMB)
    ids = torch.tensor([0, 4, -1, 3], device=DEVICE)
    out = fused.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB, position_ids=ids)
    assert out[[1, 2], :, NOPE:].isnan().all()
    assert out[[0, 3]].isfinite().all()
    assert torch.equal(out[..., :NOPE], t[..., :NOPE])


def test_tables_of_any_row_stride():
    cos, sin = tables(4, EMB)
    t = random(4, 1, HEADS, NOPE + EMB)
    expected = reference.fused_mla_rope_out_of_place(t, cos, sin, NOPE, EMB)
    wide = torch.stack((cos, sin), 1).view(4, 2, 1, 1, EMB)
    assert torch.equal(fused.fused_mla_rope_out_of_place(t, wide[:, 0], wide[:, 1], NOPE, EMB), expected)
    assert torch.equal(fused.fused_mla_rope_out_of_place(t, cos.view(4, EMB), sin.view(4, EMB), NOPE, EMB), expected)
    one_row = cos[:1].expand(4, 1, 1, EMB), sin[:1].expand(4, 1, 1, EMB)
    same = reference.fused_mla_rope_out_of_place(t, *(x.contiguous() for x in one_row), NOPE, EMB)
    assert torch.equal(fused.fused_mla_rope_out_of_place(t, *one_row, NOPE, EMB), same)


@pytest.mark.parametrize("count", [31, 32, 127, 128, 260])
def test_many_sequences_are_told_apart(count):
    """Counts around those that one load of offsets tells apart, for programs of one token and of several."""
    lengths = [(1, 0, 2)[i % 3] for i in range(count)]
    positions = [p for length in lengths for p in range(length)]
    cu = offsets(*lengths)
    cos, sin = tables(2, EMB)
    for heads, rows in ((1, None), (8, None), (2, 1)):
        t = random(len(positions) + 3, heads, NOPE + EMB)
        exact = oracle(t, cos, sin, NOPE, EMB, torch.tensor([*positions, 0, 0, 0], device=DEVICE))
        out = t.clone()
        launch_query_rope(out, out, cos, sin, cu, None, NOPE, EMB, block_rows=rows)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
