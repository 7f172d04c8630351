"""Every DSA kernel is launched with the device of its tensors current: Triton launches on the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from mla_attention import fusions
from mla_attention.fusions.dsa import operator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="watches the launches of Triton's interpreter")
TOKENS, HEADS, RANK, ROPE = 9, 2, 16, 4


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the device was made current, of each launch."""
    depth, seen = [0], []
    launch = GridExecutor.__call__

    @contextmanager
    def made_current(t: Tensor) -> Iterator[None]:
        assert isinstance(t, Tensor)
        depth[0] += 1
        yield
        depth[0] -= 1

    def watched(self: GridExecutor, *arguments: object, **named: object) -> None:
        seen.append(depth[0] > 0)
        launch(self, *arguments, **named)

    monkeypatch.setattr(operator, "on_device_of", made_current)
    monkeypatch.setattr(GridExecutor, "__call__", watched)
    return seen


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def indexer() -> tuple[Tensor, Tensor, Tensor]:
    return draw(TOKENS, HEADS, 16), draw(TOKENS, 16), draw(TOKENS, HEADS)


def attention() -> tuple[Tensor, Tensor]:
    return draw(TOKENS, HEADS, RANK + ROPE), draw(TOKENS, RANK + ROPE)


def chosen() -> Tensor:
    return torch.arange(3).expand(TOKENS, 3)


OFFSETS = torch.tensor([0, 4, TOKENS])
CALLS: dict[str, Callable[[], Tensor]] = {
    "indexer_scores": lambda: fusions.indexer_scores(*indexer(), cu_seqlens=OFFSETS),
    "topk_select": lambda: fusions.topk_select(torch.randn(3, 40), 5),
    "indexer_topk": lambda: fusions.indexer_topk(*indexer(), 3, cu_seqlens=OFFSETS),
    "sparse_mla": lambda: fusions.sparse_mla(*attention(), chosen(), 0.1, RANK)[0],
    "indexer_kl sparse": lambda: fusions.indexer_kl(*indexer(), *attention(), 0.1, topk_indices=chosen()),
    "indexer_kl dense": lambda: fusions.indexer_kl(*indexer(), *attention(), 0.1),
}


@pytest.mark.parametrize("ordered", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", CALLS)
def test_every_launch_of_forward_and_backward(name: str, ordered: bool, launches: list[bool]) -> None:
    torch.use_deterministic_algorithms(ordered)
    try:
        result = CALLS[name]()
        if name.startswith(("sparse_mla", "indexer_kl")):
            before = len(launches)
            result.sum().backward()
            assert len(launches) > before
    finally:
        torch.use_deterministic_algorithms(False)
    assert launches
    assert all(launches)
