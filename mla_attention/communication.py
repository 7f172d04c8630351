"""What a layer sends between ranks, as one object that the module calls by name.

On one rank every step is the identity. The module asks only these questions; which groups answer them is decided
outside (`mla_attention.parallel`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Communication:
    """The steps between ranks of one attention layer; this class is the single rank, where each is the identity."""

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    sequence_parallel: bool = False

    @staticmethod
    def of_groups(tp_group: ProcessGroup | None, cp_group: ProcessGroup | None) -> Communication:
        """The steps over these process groups."""
        if tp_group is None and cp_group is None:
            return Communication()
        from mla_attention.parallel.group_communication import GroupCommunication

        return GroupCommunication.of_groups(tp_group, cp_group)

    def heads_of_rank(self, heads: int) -> int:
        """Heads that this rank holds.

        Raises:
            ValueError: if the tensor-parallel ranks do not divide the heads.
        """
        if heads % self.tp_size:
            raise ValueError(
                f"num_attention_heads: given {heads}, allowed are multiples of the tensor-parallel size {self.tp_size}"
            )
        return heads // self.tp_size

    def rows_after_gather(self, rows: int) -> int:
        """Rows of the sequence axis inside the head-sharded region, for `rows` rows of hidden states."""
        return rows * self.tp_size if self.sequence_parallel else rows

    def to_heads(self, *latents: Tensor) -> tuple[Tensor, ...]:
        """Latents `[rows, .., R]` on their way into the head-sharded region: gathered along the sequence under
        sequence parallelism; their gradients are summed over the tensor-parallel ranks, once."""
        return latents

    def from_heads(self, output: Tensor) -> Tensor:
        """Partial outputs `[S, .., H]` of the row-sharded projection, summed over the tensor-parallel ranks."""
        return output

    def to_all_keys(self, *latents: Tensor) -> tuple[Tensor, ...]:
        """Per-token key latents `[S/cp, .., R]`, gathered over context-parallel ranks into global order."""
        return latents
