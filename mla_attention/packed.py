"""Packed sequences: several sequences laid end to end along one token axis.

`cu_seqlens[i]` is the row at which sequence i starts, so sequence i has `cu_seqlens[i+1] - cu_seqlens[i]` tokens.
With padded offsets, sequence i starts at row `cu_seqlens_padded[i]` and its tokens are followed by padding rows up to
`cu_seqlens_padded[i+1]`. Rows that belong to no token (padding, and everything past the last offset) come out of the
attention layer as exact zeros and take no gradient.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


class PackedSeqParams:
    """Offsets of packed sequences; the values are checked once, here, never in a forward.

    Args:
        cu_seqlens_q: start rows of the sequences and the end of the last, int32 or int64 `[sequences + 1]`, a tensor
            or a list of ints.
        cu_seqlens_kv: the same for keys; defaults to `cu_seqlens_q` and must equal it (self-attention).
        cu_seqlens_q_padded, cu_seqlens_kv_padded: start rows including padding after each sequence.
        max_seqlen_q, max_seqlen_kv: length of the longest sequence, in tokens; derived where not given.
        qkv_format: "thd".
        validate: check values on the host. For device tensors this costs one synchronisation; False skips it, and then
            `max_seqlen_q` must be given and back ends that work sequence by sequence are not available.

    Raises:
        ValueError: naming the offending field, its value and what is allowed.

    Source: the fields are those of Megatron-LM's PackedSeqParams.
    """

    def __init__(
        self,
        cu_seqlens_q: Tensor | list[int],
        cu_seqlens_kv: Tensor | list[int] | None = None,
        *,
        cu_seqlens_q_padded: Tensor | list[int] | None = None,
        cu_seqlens_kv_padded: Tensor | list[int] | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        qkv_format: str = "thd",
        validate: bool = True,
    ) -> None:
        if qkv_format != "thd":
            raise ValueError(f"qkv_format: given {qkv_format!r}, allowed is 'thd'")
        self.qkv_format = qkv_format
        self.cu_seqlens_q = _offsets("cu_seqlens_q", cu_seqlens_q)
        self.cu_seqlens_kv = self.cu_seqlens_q if cu_seqlens_kv is None else _offsets("cu_seqlens_kv", cu_seqlens_kv)
        self.cu_seqlens_q_padded = _optional_offsets("cu_seqlens_q_padded", cu_seqlens_q_padded)
        self.cu_seqlens_kv_padded = _optional_offsets("cu_seqlens_kv_padded", cu_seqlens_kv_padded)
        if self.cu_seqlens_kv_padded is None:
            self.cu_seqlens_kv_padded = self.cu_seqlens_q_padded
        elif self.cu_seqlens_q_padded is None:
            raise ValueError("cu_seqlens_kv_padded: given without cu_seqlens_q_padded; allowed is both or neither")
        self._check_alike()
        self.host_offsets: tuple[int, ...] | None = None  # start rows on the host, padding included
        self.host_lengths: tuple[int, ...] | None = None  # tokens of each sequence on the host
        if validate:
            self._read_host_values()
        longest = max(self.host_lengths, default=0) if self.host_lengths is not None else None
        self.max_seqlen_q = _longest("max_seqlen_q", max_seqlen_q, longest)
        self.max_seqlen_kv = _longest("max_seqlen_kv", max_seqlen_kv, self.max_seqlen_q)
        # Rows of the longest sequence, its padding included; max_seqlen_q where the host knows no offsets. Forwards ask
        # `longest_within`.
        self.longest_rows = self.max_seqlen_q
        # (rows, sequences) of each run of neighbours with as many rows, padding included; none of empty sequences, and
        # none where the host knows no offsets.
        self.equal_runs: tuple[tuple[int, int], ...] = ()
        if self.host_offsets is not None:
            rows = [end - start for start, end in pairwise(self.host_offsets)]
            self.longest_rows = max(rows, default=0)
            self.equal_runs = tuple((length, len(list(run))) for length, run in groupby(filter(None, rows)))
        self._token_rows: dict[tuple, Tensor] = {}
        self.key_orders: dict[tuple, Any] = {}  # of context parallelism (zigzag.key_order), by its arguments

    @property
    def row_offsets(self) -> Tensor:
        """Start rows of the sequences as they lie in the tensors: the padded offsets where there are any."""
        return self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    def longest_within(self, rows: int) -> int:
        """Rows of the longest of the sequences in `rows` rows, its padding included; where padded offsets were never
        read on the host, `rows`, which no sequence exceeds."""
        unread = self.host_offsets is None and self.cu_seqlens_q_padded is not None
        return rows if unread else self.longest_rows

    def check_rows(self, rows: int, device: torch.device) -> None:
        """Refuse a tensor of `rows` rows on `device` that these offsets cannot describe.

        Raises:
            ValueError: if the offsets reach past the rows, or live on another device.
        """
        if self.host_offsets is not None and self.host_offsets[-1] > rows:
            raise ValueError(
                f"packed_seq_params: offsets end at {self.host_offsets[-1]}, allowed is at most the {rows} rows given"
            )
        if self.cu_seqlens_q.device.type != device.type:
            raise ValueError(
                f"cu_seqlens_q: given on {self.cu_seqlens_q.device}, allowed is the device of hidden_states, {device}"
            )

    def has_padding(self, rows: int) -> bool:
        """Whether some of `rows` rows belong to no token; True where the host cannot know."""
        if self.host_offsets is None or self.host_lengths is None:
            return True
        return sum(self.host_lengths) != rows

    def sequence_of_row(self, rows: int) -> tuple[Tensor, Tensor]:
        """Sequence index and offset within it of each row, int64 `[rows]` each, on the device, without a sync.

        Rows past the last offset get the index `num_sequences`.
        """
        starts = self.row_offsets.to(torch.int64)
        row = torch.arange(rows, device=starts.device)
        sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
        return sequence, row - starts[sequence.clamp(max=self.num_sequences)]

    def token_rows(self, rows: int) -> Tensor:
        """Bool `[rows]`: which rows hold a token.

        Computed once for each row count and shared by all layers, where the host has checked the offsets. Offsets that
        the host never read may be rewritten in place (in a captured CUDA graph, say), so they are read each time.
        """
        key = (rows, self.cu_seqlens_q.device)
        known = self._token_rows.get(key)
        if known is not None:
            return known
        sequence, offset = self.sequence_of_row(rows)
        lengths = self.cu_seqlens_q.diff().to(torch.int64)
        keep = offset < torch.cat([lengths, lengths.new_zeros(1)])[sequence]
        if self.host_offsets is not None:
            self._token_rows[key] = keep
        return keep

    def _check_alike(self) -> None:
        for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            other = getattr(self, name)
            if other is None:
                continue
            if other.shape != self.cu_seqlens_q.shape:
                raise ValueError(
                    f"{name}: given {other.shape[0]} entries, "
                    f"allowed is as many as cu_seqlens_q has, {self.cu_seqlens_q.shape[0]}"
                )
            if other.device != self.cu_seqlens_q.device:
                raise ValueError(
                    f"{name}: given on {other.device}, "
                    f"allowed is the device of cu_seqlens_q, {self.cu_seqlens_q.device}"
                )

    def _read_host_values(self) -> None:
        fields = [self.cu_seqlens_q, self.cu_seqlens_kv]
        if self.cu_seqlens_q_padded is not None and self.cu_seqlens_kv_padded is not None:
            fields += [self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded]
        if self.cu_seqlens_q.is_meta:
            raise ValueError("cu_seqlens_q: given on meta, which has no values to check; allowed with validate=False")
        values = torch.stack([field.detach().to(torch.int64) for field in fields]).tolist()  # the one synchronisation
        _check_offsets("cu_seqlens_q", values[0])
        if values[1] != values[0]:
            raise ValueError(
                f"cu_seqlens_kv: given {_short(values[1])}, "
                f"allowed is cu_seqlens_q's {_short(values[0])} (self-attention)"
            )
        self.host_lengths = tuple(end - start for start, end in pairwise(values[0]))
        self.host_offsets = tuple(values[0])
        if len(values) > 2:
            _check_offsets("cu_seqlens_q_padded", values[2])
            if values[3] != values[2]:
                raise ValueError(
                    f"cu_seqlens_kv_padded: given {_short(values[3])}, "
                    f"allowed is cu_seqlens_q_padded's {_short(values[2])}"
                )
            for i, (length, (start, end)) in enumerate(zip(self.host_lengths, pairwise(values[2]), strict=True)):
                if end - start < length:
                    raise ValueError(
                        f"cu_seqlens_q_padded: sequence {i} has room for {end - start} rows, "
                        f"allowed is at least its {length} tokens"
                    )
            self.host_offsets = tuple(values[2])

    def __repr__(self) -> str:
        padded = self.cu_seqlens_q_padded is not None
        return f"PackedSeqParams(sequences={self.num_sequences}, max_seqlen_q={self.max_seqlen_q}, padded={padded})"


def _offsets(name: str, value: Tensor | list[int]) -> Tensor:
    if isinstance(value, (list, tuple)):
        if not all(isinstance(v, Integral) and not isinstance(v, bool) for v in value):
            raise ValueError(f"{name}: given {_short(list(value))}, allowed are integers")
        if any(abs(v) >= 2**31 for v in value):
            raise ValueError(f"{name}: given {_short(list(value))}, allowed are integers below 2**31")
        value = torch.tensor(value, dtype=torch.int32)
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: given {type(value).__name__}, allowed is an int32 or int64 tensor or a list of ints")
    if value.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: given dtype {value.dtype}, allowed are torch.int32 and torch.int64")
    if value.dim() != 1 or value.shape[0] < 1:
        raise ValueError(f"{name}: given shape {tuple(value.shape)}, allowed is [sequences + 1]")
    return value


def _optional_offsets(name: str, value: Tensor | list[int] | None) -> Tensor | None:
    return None if value is None else _offsets(name, value)


def _check_offsets(name: str, values: list[int]) -> None:
    if values[0] != 0:
        raise ValueError(f"{name}: starts at {values[0]}, allowed is a start at 0")
    for i, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(
                f"{name}: falls from {start} to {end} at entry {i + 1}, allowed are non-decreasing offsets"
            )


def _longest(name: str, given: int | None, known: int | None) -> int:
    if given is None:
        if known is None:
            raise ValueError(
                f"{name}: not given, but validate=False leaves it unknown; pass the longest length in tokens"
            )
        return known
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(f"{name}: given {given!r}, allowed are integers >= 0")
    if known is not None and given < known:
        raise ValueError(f"{name}: given {given}, allowed is at least the longest sequence, {known}")
    return given


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:6]))}, ... {values[-1]}]"
