"""The test support is tested too: each guard is seen to fail."""

import os

import numpy as np
import pytest
import torch

from tests.aot.harness import in_fresh_process
from tests.guards import Guarded, guarded, guarded_allocations
from tests.interpreter_bf16 import decode, encode

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the GPU here")


def test_guarded_memory_reports_a_write_outside() -> None:
    t, guard = guarded(torch.ones(2, 3), stride=(5, 1))
    guard.check()
    guard._buffer.as_strided((1,), (1,), t.storage_offset() + 3).fill_(0)
    with pytest.raises(AssertionError, match="1 elements outside"):
        guard.check()


def test_guarded_memory_is_poisoned_and_allows_writes_inside() -> None:
    guard = Guarded((4,), torch.bfloat16, offset=1)
    assert guard.tensor.isnan().all()
    guard.tensor.zero_()
    guard.check()


def test_guarded_allocations_catch_what_torch_empty_returns() -> None:
    with guarded_allocations() as guards:
        t = torch.empty(3, 2, dtype=torch.float16)
        like, new = torch.empty_like(t), t.new_empty((2,))
    assert len(guards) == 3
    assert t.isnan().all()
    assert like.shape == t.shape
    assert new.shape == (2,)


def test_bfloat16_rounds_like_torch() -> None:
    bits = torch.arange(0, 2**31, 65521, dtype=torch.int64).to(torch.int32)
    values = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    expected = values.bfloat16()
    got = torch.from_numpy(encode(values.numpy())).view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    every = np.arange(65536, dtype=np.uint16)
    exact = torch.from_numpy(every).view(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(decode(every)).nan_to_num(), exact.nan_to_num())


@interpreted
def test_bfloat16_arithmetic_must_go_through_fp32() -> None:
    from tests.aot.example_kernel import double_kernel

    x = torch.randn(100).bfloat16()
    y = torch.empty_like(x)
    double_kernel[(1,)](x, y, 100, BLOCK=128, UPCAST=True, BARRIER=True, num_warps=1, enable_fp_fusion=False)
    assert torch.equal(y, (x.float() + x.float()).bfloat16())
    with pytest.raises(Exception, match="convert to float32"):
        double_kernel[(1,)](x, y, 100, BLOCK=128, UPCAST=False, BARRIER=True)


def test_ahead_of_time_facts() -> None:
    for fact in in_fresh_process("tests.aot.example_kernel:facts"):
        kinds = [kind for kind in fact["order"] if kind != "barrier"]
        assert kinds[0] == "load"
        assert kinds[-1] == "store"
        assert ("barrier" in fact["order"]) == fact["barrier"]
        assert fact["spills"] == 0
        assert fact["registers"] > 0
        assert fact["shared"] == 0
