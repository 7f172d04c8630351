"""The interface that every core attention back end has, and what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from mla_attention.packed import PackedSeqParams
from mla_attention.token_layout import TokenLayout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class CoreAttention(nn.Module):
    """softmax(q k^T * scale) v over causal keys of the same sequence.

    Args:
        qk_dim: Dn+Dr. v_dim: Dv.
        scale: factor on q.k.
        dropout: probability on the attention weights, in training only.
    """

    name = ""
    context_parallel = False  # whether `forward` serves a shard of the rows against the keys of all ranks

    def __init__(self, qk_dim: int, v_dim: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.qk_dim = qk_dim
        self.v_dim = v_dim
        self.scale = scale
        self.dropout = dropout

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenLayout) -> Tensor:
        """Attention output.

        Args:
            query, key: `[S, B, n, Dq]`, packed `[T, n, Dq]`; value the same with Dv, any strides with a unit last one.
                Under context parallelism query has the rank's rows, key and value those of all ranks in global order.
            tokens: the layout of the query's rows.

        Returns:
            `[S, B, n, Dv]`, packed `[T, n, Dv]`, in the dtype of value.
        """

    def refusal(self, device: torch.device, *, packed: bool) -> str | None:
        """Why this back end cannot serve these head dims on this device, or None where it can."""
        return None

    def check(self, device: torch.device, *, packed: bool, cp_size: int = 1) -> None:
        """Raise the refusal.

        Raises:
            ValueError: naming back end, head dims, layout and device.
        """
        reason = self.refusal(device, packed=packed)
        if reason is None and cp_size > 1 and not self.context_parallel:
            reason = "with context parallelism allowed are 'auto', 'sdpa', 'varlen', 'flex' and 'reference'"
        if reason is not None:
            raise ValueError(
                f"core_attention_backend: given {self.name!r} for qk dim {self.qk_dim}, v dim {self.v_dim}, "
                f"{'thd' if packed else 'sbhd'} on {describe(device)}; {reason}"
            )

    @property
    def dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        return f"qk_dim={self.qk_dim}, v_dim={self.v_dim}, scale={self.scale:.6f}"


def describe(device: torch.device) -> str:
    """A device in words, with its compute capability where it has one."""
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} (compute capability {major}.{minor})"


def row_lengths(packed: PackedSeqParams, rows: int) -> list[int] | None:
    """Rows of each packed sequence, padding included, and the rows past the last; None where the host does not know."""
    if packed.host_offsets is None:
        return None
    offsets = packed.host_offsets
    return [end - start for start, end in pairwise(offsets)] + [rows - offsets[-1]]


def rows_outside(tokens: TokenLayout) -> Tensor | None:
    """Bool `[rows, 1, 1]`: packed rows past the last offset, in no sequence; None where the host knows of none.

    Kernels that walk the offsets neither read nor write such rows, forward and backward: what is there is whatever the
    memory held. So operands and output are masked with this, lest it meets a zero gradient and gives NaN.
    """
    packed = tokens.packed
    if packed is None or (packed.host_offsets is not None and packed.host_offsets[-1] == tokens.rows):
        return None
    sequence, _ = packed.sequence_of_row(tokens.rows)
    return (sequence == packed.num_sequences)[:, None, None]


def by_sequence(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], attend: Attend) -> Tensor:
    """`attend(q, k, v)` on each sequence of `lengths`; the last length is of rows in no sequence, which give zeros."""
    *pieces, (_, _, outside) = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    outputs = [attend(q, k, v) if q.shape[0] else v for q, k, v in pieces]
    outputs.append(outside.masked_fill(torch.ones((), dtype=torch.bool, device=value.device), 0))
    return torch.cat(outputs)
