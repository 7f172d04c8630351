"""Real text as bytes: the corpus and the batches that train_step.py draws from it.

The default corpus needs no download: it is the source of the Python standard library on this machine.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from mla_attention import PackedSeqParams

CORPUS_BYTES = 4_000_000


@dataclass(frozen=True)
class Batch:
    """Inputs and next-byte targets, int64 `[S, B]` (packed: `[T, 1]`), and the offsets of packed documents."""

    inputs: Tensor
    targets: Tensor
    packed: PackedSeqParams | None = None


def load_text(path: Path | None) -> Tensor:
    """Read a file, or the first 4 MB of the standard library's modules in name order, as uint8 `[bytes]`.

    Raises:
        ValueError: if the file cannot be read, or there is no standard library source on this machine.
    """
    if path is not None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"--data: cannot read {str(path)!r} ({error.strerror}), allowed is a readable file"
            ) from error
    else:
        content = _standard_library_source(CORPUS_BYTES)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _standard_library_source(limit: int) -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    pieces: list[bytes] = []
    size = 0
    for file in sorted(folder.glob("*.py")):
        pieces.append(file.read_bytes())
        size += len(pieces[-1])
        if size >= limit:
            break
    if not pieces:
        raise ValueError(f"--data: not given, and {str(folder)!r} holds no .py file; allowed is a file of text")
    return b"".join(pieces)[:limit]


class BatchSource:
    """Batches drawn at random positions of a text; one seed gives one sequence of batches.

    Args:
        text: uint8 `[bytes]`.
        seq_len: tokens of a sequence; for packed batches the longest document.
        batch_size: sequences of a batch; a packed batch holds `seq_len * batch_size` tokens in all.
        packed: documents of uneven length laid end to end, instead of equal rows.
        length_multiple: packed document lengths are multiples of this; divides seq_len.
        seed: of the random positions and lengths.
        device: where the batches go.

    Raises:
        ValueError: if the text is too short for one sequence and its last target.
    """

    def __init__(
        self,
        text: Tensor,
        *,
        seq_len: int,
        batch_size: int,
        packed: bool,
        length_multiple: int,
        seed: int,
        device: torch.device,
    ) -> None:
        if text.numel() < seq_len + 1:
            raise ValueError(f"--data: holds {text.numel()} bytes, allowed is at least --seq-len + 1 = {seq_len + 1}")
        self.text = text
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.packed = packed
        self.length_multiple = length_multiple
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def next(self) -> Batch:
        lengths = self._document_lengths() if self.packed else [self.seq_len] * self.batch_size
        documents = [self._read(length + 1) for length in lengths]
        if not self.packed:
            rows = torch.stack(documents, dim=1)  # [S + 1, B]
            return Batch(rows[:-1].contiguous(), rows[1:].contiguous())
        inputs = torch.cat([document[:-1] for document in documents]).unsqueeze(1)  # [T, 1]
        targets = torch.cat([document[1:] for document in documents]).unsqueeze(1)
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
        return Batch(inputs, targets, PackedSeqParams(offsets, max_seqlen_q=self.seq_len))

    def _document_lengths(self) -> list[int]:
        """Lengths from seq_len / 8 to seq_len, the last one cut, that fill `seq_len * batch_size` tokens exactly."""
        lengths: list[int] = []
        room = self.seq_len * self.batch_size
        while room > 0:
            drawn = int(torch.randint(max(self.seq_len // 8, 1), self.seq_len + 1, (), generator=self.generator))
            length = min(max(drawn // self.length_multiple, 1) * self.length_multiple, room)
            lengths.append(length)
            room -= length
        return lengths

    def _read(self, length: int) -> Tensor:
        start = int(torch.randint(0, self.text.numel() - length + 1, (), generator=self.generator))
        return self.text[start : start + length].to(self.device, torch.int64)
