"""key_ranges, and its kernel, against a loop over sequences."""

import pytest
import torch

from mla_attention.fusions.dsa.key_ranges import key_ranges
from mla_attention.fusions.dsa.key_ranges_kernel import launch_key_ranges
from tests.guards import guarded_allocations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def told(rows, keys, offsets, positions):
    """(begin, end) of each row."""
    ranges = []
    for t in range(rows):
        p = t if positions is None else positions[t]
        start, seen = 0, p >= 0
        if offsets is not None:
            holders = [a for a, b in zip(offsets, offsets[1:], strict=False) if a <= p < b]  # noqa: RUF007
            seen, start = seen and bool(holders), (holders or [0])[0]
        ranges.append((min(start, keys), min(p + 1, keys)) if seen else (0, 0))
    return ranges


@pytest.mark.parametrize("function", [key_ranges, launch_key_ranges], ids=["torch", "kernel"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [None, [0], [0, 7], [0, 0, 3, 3, 3, 9], [0, 1, 2, 4, 8, 10, 10], [0, 0]])
@pytest.mark.parametrize("positions", [None, [0, 9, 3, -1, 2, 8, 7, 7, -4, 1, 11]])
def test_ranges_equal_a_loop(function, dtype, offsets, positions):
    rows = 11
    with guarded_allocations():
        begin, end = function(
            rows,
            10,
            device=DEVICE,
            cu_seqlens=None if offsets is None else torch.tensor(offsets, dtype=dtype, device=DEVICE),
            q_positions=None if positions is None else torch.tensor(positions, dtype=dtype, device=DEVICE),
        )
    assert begin.dtype == end.dtype == torch.int32
    found = list(zip(begin.tolist(), end.tolist(), strict=True))
    assert [r if r[0] < r[1] else None for r in found] == [
        r if r[0] < r[1] else None for r in told(rows, 10, offsets, positions)
    ]
    assert all(b <= e for b, e in found)


def test_kernel_takes_more_rows_than_a_block():
    positions = torch.randperm(2500, device=DEVICE)
    offsets = torch.arange(0, 2501, 4, device=DEVICE)
    arguments = {"device": DEVICE, "cu_seqlens": offsets, "q_positions": positions}
    for one, other in zip(key_ranges(2500, 2500, **arguments), launch_key_ranges(2500, 2500, **arguments), strict=True):
        assert torch.equal(one, other)
