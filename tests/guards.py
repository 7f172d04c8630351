"""Memory that tells when a kernel wrote where it must not, or read what it must not.

Every allocation is filled with a NaN of its own (integers: a rare value) and lies between bands of the same filling.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor

BAND = 512
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RARE = {torch.int32: 0x5A5A5A00, torch.int64: 0x5A5A5A5A5A5A5A00}
_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000, torch.float64: 0x7FF8000000000000}
_empty = torch.empty
_allocations = count()


def _poison(dtype: torch.dtype) -> int:
    """Bits of a NaN (or a rare integer) that the next 50 allocations do not share: a stray copy is a change."""
    return (_NAN | _RARE).get(dtype, 0) + 1 + next(_allocations) % 50


class Guarded:
    """A tensor inside a poisoned buffer.

    Args:
        shape: shape of the tensor.
        dtype: its dtype.
        device: its device.
        stride: its strides in elements; None means contiguous. Gaps between elements are guarded as well.
        offset: elements by which the tensor starts later, to try other alignments.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        stride: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> None:
        shape = tuple(shape)
        if stride is None:
            stride = _empty(shape, device="meta").stride()
        span = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        self._buffer = _empty(span + 2 * BAND + offset, dtype=dtype, device=device)
        self._poison = _poison(dtype)
        self._bits().fill_(self._poison)
        self._geometry = (shape, stride, BAND + offset)
        self.tensor = self._buffer.as_strided(*self._geometry)

    def _bits(self) -> Tensor:
        return self._buffer.view(_BITS[self._buffer.element_size()])

    def check(self) -> None:
        """Fail if any element outside the tensor has changed by a single bit."""
        covered = torch.zeros(self._buffer.shape, dtype=torch.bool, device=self._buffer.device)
        covered.as_strided(*self._geometry).fill_(True)
        changed = (self._bits() != self._poison) & ~covered
        where = changed.nonzero().flatten().tolist()
        assert not where, (
            f"{len(where)} elements outside a tensor of shape {self._geometry[0]} were written: {where[:8]}"
        )


def guarded(values: Tensor, stride: tuple[int, ...] | None = None, offset: int = 0) -> tuple[Tensor, Guarded]:
    """Copy `values` into guarded memory with the given strides; returns the tensor and its guard."""
    guard = Guarded(tuple(values.shape), values.dtype, values.device, stride, offset)
    guard.tensor.copy_(values)
    return guard.tensor, guard


@contextmanager
def guarded_allocations() -> Iterator[list[Guarded]]:
    """Give every `torch.empty`, `torch.empty_like` and `Tensor.new_empty` guarded memory; checks it at the end.

    What a kernel forgets to write stays NaN.
    """
    guards: list[Guarded] = []

    def allocate(shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        guard = Guarded(tuple(shape), dtype, device)
        guards.append(guard)
        return guard.tensor

    def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = "cpu", **_: Any) -> Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return allocate(sizes, dtype or torch.get_default_dtype(), device or "cpu")

    def empty_like(t: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        return allocate(t.shape, dtype or t.dtype, device or t.device)

    def new_empty(t: Tensor, *shape: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        return empty(*shape, dtype=dtype or t.dtype, device=device or t.device)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(torch.Tensor, "new_empty", new_empty),
    ):
        yield guards
    for guard in guards:
        guard.check()
