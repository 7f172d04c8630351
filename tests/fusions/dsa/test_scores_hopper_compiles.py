"""The Gluon score kernel compiles for a Hopper that is not there, in the order of events that its speed rests on."""

import os

import pytest
import torch

from mla_attention.fusions.dsa import indexer_scores as score_kernels
from tests.aot.harness import MEASURED_TRITON, in_fresh_process

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled for real here"),
    pytest.mark.skipif(not MEASURED_TRITON, reason="the Gluon kernels are for Triton 3.6"),
]
MODULE = "tests.fusions.dsa.compile_scores_hopper"
SHARED_BYTES = 227 * 1024
CASES = {
    "glm5": {"heads": 32},
    "glm5 packed": {"heads": 32, "packed": True},
    "deepseek_v32": {"heads": 64, "packed": True, "fill": False},
    "odd": {"heads": 5, "width": 64, "dtype": "float16"},
    "one head": {"heads": 1},
    "no relu": {"heads": 32, "relu": False},
}


@pytest.fixture(scope="module")
def facts():
    return in_fresh_process(f"{MODULE}:compile_all", cases=CASES)


@pytest.mark.parametrize("case", CASES)
def test_it_fits_and_its_products_stay_asynchronous(facts, case):
    assert not facts[case]["serialised"]
    assert facts[case]["shared"] <= SHARED_BYTES
    assert facts[case]["registers"] == 168  # of a launch; 12 warps of them are shared out anew
    assert facts[case]["registers of the copying warp"] < 24
    assert facts[case]["tma"] > 0
    assert facts[case]["wide stores"] == 64  # every score of a whole tile, two at a time


@pytest.mark.parametrize("case", ["glm5", "glm5 packed", "deepseek_v32"])
def test_a_head_is_added_while_the_next_one_multiplies(facts, case):
    """P starts a product, w waits for all but the last, W for all, M64 is the sum of one head, m a spilled word."""
    turns = [turn.strip("m") for turn in facts[case]["order"].replace("WM", "W M").split("PP") if turn]
    loops = [turn for turn in turns if "P" in turn]
    assert len(loops) == 2  # one a warpgroup
    for loop in loops:
        assert loop.startswith("wM64PwM64Pw")
        assert "m" not in loop[: loop.index("W")]
    assert facts[case]["spills between products"] == 0
    assert facts[case]["wgmma"] == 2 * 4 * 8  # warpgroups, heads a turn, steps of 16


def test_it_multiplies_and_adds_with_the_instructions_of_the_portable_kernel():
    ours, portable = in_fresh_process(f"{MODULE}:arithmetic", heads=32)
    assert ours == portable
    assert len(ours) == 3


def test_the_choice_never_asks_the_lengths(monkeypatch):
    assert score_kernels.PREFER_HOPPER_SCORES
    q, k = torch.empty(4, 2, 128, dtype=torch.bfloat16), torch.empty(6, 128, dtype=torch.bfloat16)
    assert not score_kernels.takes_hopper_scores(q, k)

    class OnHopper(torch.Tensor):
        device = torch.device("cuda")

    def takes(q, k):
        return score_kernels.takes_hopper_scores(q.as_subclass(OnHopper), k.as_subclass(OnHopper))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert takes(q, k)
    assert takes(q[:1, :1], k[:1])
    assert takes(torch.empty(4, 3, 64, dtype=torch.float16), torch.empty(1, 64, dtype=torch.float16))
    assert not takes(q.float(), k.float())
    assert not takes(q[..., :96], k[:, :96])
    assert not takes(q.transpose(0, 1), k)  # the rows of one head apart: rows of all heads would overlap
    assert not takes(q[:1].expand(4, 2, 128), k)
    assert not takes(q, k[:1].expand(6, 128))
    assert not takes(q, torch.empty(6, 129, dtype=torch.bfloat16)[:, 1:])
    assert not takes(torch.empty(4, 2 * 128 + 4, dtype=torch.bfloat16)[:, :256].view(4, 2, 128), k)
    assert not takes(torch.empty(4 * 256 + 4, dtype=torch.bfloat16)[4:].view(4, 2, 128), k)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not takes(q, k)
