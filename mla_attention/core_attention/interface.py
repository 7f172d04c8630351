"""The interface that every core attention back end has, and what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mla_attention.packed import PackedSeqParams
from mla_attention.token_layout import TokenLayout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_SCORES = 2**26  # in a batch of sequences
_LARGEST_BATCH = 65535  # of what some kernels put on a grid's second axis


class CoreAttention(nn.Module):
    """softmax(q k^T * scale) v over causal keys of the same sequence.

    Args:
        qk_dim: Dn+Dr. v_dim: Dv.
        scale: factor on q.k.
        dropout: probability on the attention weights, in training only.
    """

    name = ""
    context_parallel = False  # whether `forward` serves a shard of the rows

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
                Under context parallelism query has the rank's rows, key and value those of all ranks in global order;
                with a `cp_comm_type` the rank's rows too.
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
            reason = (
                "with context parallelism allowed are 'auto', 'sdpa', 'varlen', 'flex' and 'reference', "
                "or 'te' with a cp_comm_type"
            )
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


def by_sequence(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, attend: Attend, *, holds_scores: bool
) -> Tensor:
    """Attention of packed rows `[T, n, D]` from that of sequences; rows past the last offset give zeros.

    Neighbours of one length are a batch where they lie, so a pack of equal lengths is neither cut nor put together.

    Args:
        query, key, value: of all rows.
        packed: offsets that the host knows.
        attend: from q, k, v `[S, B, n, D]` of B sequences of S rows each to `[S, B, n, Dv]`.
        holds_scores: whether `attend` holds the scores of all pairs; a batch then has at most 256 MiB of them in fp32.
    """
    runs = []
    for length, count in packed.equal_runs:
        most = max(1, _SCORES // (query.shape[1] * length * length)) if holds_scores else _LARGEST_BATCH
        runs += [(length, min(most, count - done)) for done in range(0, count, most)]
    rows = [length * count for length, count in runs]
    outside = query.shape[0] - sum(rows)
    sizes = [*rows, outside] if outside else rows
    whole = (query, key, value)  # the gradient of a split is a copy, so one piece is not split
    pieces = zip(*(t.split(sizes) for t in whole), strict=True) if len(sizes) > 1 else [whole]
    outputs = []
    for (length, count), piece in zip(runs, pieces, strict=False):
        q, k, v = (t.unflatten(0, (count, length)).transpose(0, 1) for t in piece)
        outputs.append(attend(q, k, v).transpose(0, 1).flatten(0, 1))
    if outside or not outputs:
        outputs.append(no_attention(query, key, value[sum(rows) :]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def no_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Zeros where `value` lies, for rows that attend to nothing, with gradients of zero for all three."""
    nowhere = torch.ones((), dtype=torch.bool, device=value.device)
    return value.masked_fill(nowhere, 0) + (query[:0].sum() + key[:0].sum())


def with_contiguous_gradient(output: Tensor) -> Tensor:
    """`output`; the gradient that arrives at it goes on contiguous, however it lay.

    By a hook, which leaves `output` the tensor that it was; but a compiled graph takes hooks less well than a function.
    """
    if torch.compiler.is_compiling():
        return _ContiguousGradient.apply(output)
    if output.requires_grad:
        output.register_hook(torch.Tensor.contiguous)
    return output


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
