"""The selection kernels compile for GPUs that are not there, with what their speed and exactness rest on."""

import os

import pytest

from tests.aot.harness import CUDA_TARGETS, MEASURED_TRITON, TARGETS, in_fresh_process

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled for real here")
MODULE = "tests.fusions.dsa.compile_selection"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target[0]}-{target[1]}")
def test_every_kernel_preset_and_range_compiles(target):
    facts = in_fresh_process(f"{MODULE}:compile_all", target=target)
    assert facts["ranges"] == 0
    for preset, scores in facts["scores"].items():
        if target in CUDA_TARGETS:
            assert not MEASURED_TRITON or scores["spills"] == 0, (preset, scores)
            assert scores["shared"] <= 160 * 1024
        else:
            assert scores["shared"] <= 64 * 1024
    for topk in facts["topk"].values():
        assert topk["atomics"] == 0
        assert not topk["flushes denormals in comparisons"]
        assert not MEASURED_TRITON or topk["scatters through shared memory"] == 0
        if MEASURED_TRITON and target in CUDA_TARGETS:
            assert topk["wide loads"] >= 2
            assert topk["votes"] > 0
            assert topk["shared"] <= 1024  # sums alone pass between threads: no tile changes its layout


def test_row_and_key_counts_share_one_binary():
    assert in_fresh_process(f"{MODULE}:count_binaries", counts=[1, 7, 16, 1000, 4096, 4097]) == 3
