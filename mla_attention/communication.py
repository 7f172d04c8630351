"""What a layer sends between ranks, as one object that the module calls by name.

On one rank every step is the identity. The module asks only these questions; which groups answer them is decided
outside (`mla_attention.parallel`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mla_attention.layers.torch_layers import Share
from mla_attention.zigzag import KeyOrder


class KeysUnderWay(Protocol):
    """Key latents of all ranks that were sent for."""

    def finish(self, order: KeyOrder) -> Tensor:
        """The latents of a token side by side, in global order."""


@dataclass(frozen=True)
class Communication:
    """The steps between ranks of one attention layer; this class is the single rank, where each is the identity.

    Tensors `[rows, ..]` have the sequence axis first. Under sequence parallelism a rank of the tensor-parallel group
    holds a slice of the rows outside the head-sharded region and all of them inside it.

    With a `cp_comm_type` keys stay on their context-parallel rank: core attention exchanges them (`MLAConfig`).
    """

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    sequence_parallel: bool = False
    cp_comm_type: str | None = None

    @staticmethod
    def of_groups(
        tp_group: ProcessGroup | None, cp_group: ProcessGroup | None, cp_comm_type: str | None = None
    ) -> Communication:
        """The steps over these process groups.

        Raises:
            ValueError: for groups that do not contain this process, or that share another rank than this one.
        """
        if tp_group is None and cp_group is None:
            return ONE_RANK
        from mla_attention.parallel.group_communication import GroupCommunication

        return GroupCommunication.over(tp_group, cp_group, cp_comm_type=cp_comm_type)

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The tensor-parallel group; None where there is one rank."""
        return None

    def attach(self, layer: nn.Module) -> None:
        """Let the layer's parameters sum their gradients over the ranks that each see a part of the tokens, and its
        core attention know with whom to exchange keys, where it does."""
        return

    def heads_of_rank(self, heads: int) -> int:
        """Heads that this rank holds.

        Raises:
            ValueError: if the tensor-parallel ranks do not divide the heads, or "a2a" cannot deal out a rank's.
        """
        if heads % self.tp_size:
            raise ValueError(
                f"num_attention_heads: given {heads}, allowed are multiples of the tensor-parallel size {self.tp_size}"
            )
        own = heads // self.tp_size
        multiple = math.lcm(2, self.cp_size)  # 2: Transformer Engine's own rule
        if self.cp_comm_type == "a2a" and self.cp_size > 1 and own % multiple:
            raise ValueError(
                f"cp_comm_type: given 'a2a' for {own} heads on each of {self.cp_size} context-parallel ranks, "
                f"allowed are multiples of {multiple} heads, or 'p2p' and 'all_gather'"
            )
        return own

    def share(self, dim: int) -> Share | None:
        """The part of a weight, cut by heads along `dim`, that this rank holds; None for the whole."""
        return None if self.tp_size == 1 else Share(dim, self.tp_rank, self.tp_size)

    def check_alike(self, hidden_states: Tensor) -> None:
        """Refuse, on every rank, hidden states of which the ranks hold different numbers of rows.

        Raises:
            ValueError: naming the rows of each rank and what is allowed.
        """
        return

    def rows_after_gather(self, rows: int) -> int:
        """Rows of the sequence axis inside the head-sharded region, for `rows` rows of hidden states."""
        return rows * self.tp_size if self.sequence_parallel else rows

    def own_slice(self, rows: Tensor) -> Tensor:
        """This rank's hidden-state rows of something `[rows, ..]` known for all rows of the head-sharded region."""
        if not self.sequence_parallel:
            return rows
        own = rows.shape[0] // self.tp_size
        return rows[self.tp_rank * own : (self.tp_rank + 1) * own]

    def to_heads(self, *latents: Tensor) -> tuple[Tensor, ...]:
        """Latents `[rows, .., R]` on their way into the head-sharded region: gathered along the sequence under
        sequence parallelism; their gradients are summed over the tensor-parallel ranks, once."""
        return latents

    def from_heads(self, output: Tensor) -> Tensor:
        """Partial outputs `[S, .., H]` of the row-sharded projection, summed over the tensor-parallel ranks."""
        return output

    def to_every_rank(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors `[rows, .., D]` that every tensor-parallel rank uses in the same way: gathered along the sequence
        under sequence parallelism; the gradient, the same on every rank, is not summed."""
        return tensors

    def start_to_all_keys(self, *latents: Tensor) -> KeysUnderWay | None:
        """Send the latents of `to_all_keys` ahead of the call, where nothing stands in between; None elsewhere."""
        return None

    def to_all_keys(
        self, *latents: Tensor, order: KeyOrder | None, started: KeysUnderWay | None = None
    ) -> tuple[Tensor, ...]:
        """Per-token key latents `[S/cp, .., R]`, gathered over context-parallel ranks into global order; as they are
        where core attention exchanges keys."""
        return latents

    def sum_over_context(self, value: Tensor) -> Tensor:
        """The sum of each context-parallel rank's value; the gradient passes as it is."""
        return value

    def max_over_context(self, value: Tensor) -> Tensor:
        """The largest of the context-parallel ranks' values, without a gradient."""
        return value


ONE_RANK = Communication()
