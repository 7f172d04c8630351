"""The steps between ranks of one attention layer, over process groups.

    tensor parallel     latents -> [identity | sum of gradients] -> heads -> [sum | identity] -> output
    sequence parallel   latents -> [gather rows | sum and scatter] -> heads -> [sum and scatter | gather] -> output
    context parallel    key latents -> [gather into global order | sum and scatter] -> keys and values of all tokens

(forward | backward.) All latents of a token travel as one row: q_latent, kv_latent and the shared rotary key cross the
tensor-parallel boundary in one collective each way, so the gradient of the rotary key is summed over the heads of all
ranks exactly once. Under context parallelism Rkv+Dr channels a token travel, not the keys and values of all heads;
unless a `cp_comm_type` leaves it to Transformer Engine's core attention to exchange these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mla_attention.communication import Communication, KeysUnderWay
from mla_attention.core_attention.te import TEAttention
from mla_attention.fusions.host_checks import values_are_validated
from mla_attention.layers.torch_layers import Linear, LocalParameters, identity
from mla_attention.parallel import collectives
from mla_attention.parallel.plan import ON_SEQUENCE_SLICES
from mla_attention.parallel.rank_group import GradientSum, RankGroup
from mla_attention.zigzag import KeyOrder


@dataclass(frozen=True)
class GroupCommunication(Communication):
    """`Communication` over a tensor-parallel and a context-parallel group, None where there is one rank.

    A rank that fails leaves the others in a collective until the timeout of the process group, which the caller sets
    (`torch.distributed.init_process_group(timeout=...)`); then, or when gloo sees the connection closed, they raise
    too.
    """

    tp: RankGroup | None = None
    cp: RankGroup | None = None
    _checked: list[bool] = field(default_factory=list, compare=False, repr=False)  # one entry after the first forward

    @staticmethod
    def over(
        tp_group: ProcessGroup | None,
        cp_group: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
        cp_comm_type: str | None = None,
    ) -> GroupCommunication:
        """The steps over these process groups; a group of one rank is none.

        Raises:
            ValueError: for groups that do not contain this process, that share another rank than this one, or for
                sequence parallelism over one tensor-parallel rank.
        """
        tp = None if tp_group is None else RankGroup(tp_group, "tp_group")
        cp = None if cp_group is None else RankGroup(cp_group, "cp_group")
        if tp is not None and cp is not None and len(set(tp.ranks) & set(cp.ranks)) > 1:
            raise ValueError(
                f"tp_group, cp_group: given ranks {list(tp.ranks)} and {list(cp.ranks)}, "
                "allowed are groups that share no rank but this one"
            )
        tp, cp = (None if group is None or group.size == 1 else group for group in (tp, cp))
        if sequence_parallel and tp is None:
            raise ValueError(
                "sequence_parallel: given True with a tensor-parallel size of 1, allowed are sizes above 1"
            )
        return GroupCommunication(
            tp_rank=0 if tp is None else tp.rank,
            tp_size=1 if tp is None else tp.size,
            cp_rank=0 if cp is None else cp.rank,
            cp_size=1 if cp is None else cp.size,
            sequence_parallel=sequence_parallel,
            cp_comm_type=cp_comm_type,
            tp=tp,
            cp=cp,
        )

    @property
    def tp_group(self) -> ProcessGroup | None:
        return None if self.tp is None else self.tp.group

    def attach(self, layer: nn.Module) -> None:
        for name, part in layer.named_modules():
            if isinstance(part, TEAttention):
                part.exchange_over(self.cp)
            if not isinstance(part, LocalParameters):
                continue
            on_slices = self.sequence_parallel and name in ON_SEQUENCE_SLICES
            part.sum_gradient = self._gradient_sum(on_slices or part.in_head_region)
            if isinstance(part, Linear):
                part.sum_bias_gradient = self._gradient_sum(self.sequence_parallel)  # the caller adds it to its rows

    def _gradient_sum(self, over_tp: bool) -> Callable[[Tensor], Tensor]:
        groups = [group for group in (self.cp, self.tp if over_tp else None) if group is not None]
        return GradientSum(*groups) if groups else identity

    def check_alike(self, hidden_states: Tensor) -> None:
        """Compare the ranks' rows, at the first forward (with one device sync) and always under validation.

        Ranks that disagreed would not fail by themselves: collectives would mix their rows, or wait for ever.
        """
        if torch.compiler.is_compiling() or (self._checked and not values_are_validated()):
            return
        numbers = [*hidden_states.shape[:2], self.tp_size, self.cp_size]
        for group, dims in ((self.tp, "tensor-parallel"), (self.cp, "context-parallel")):
            if group is not None:
                found = collectives.numbers_of_ranks(numbers, hidden_states.device, group.group)
                _refuse_different(found, dims, group.size if dims[0] == "t" else 2 * group.size)
        self._checked.append(True)

    def to_heads(self, *latents: Tensor) -> tuple[Tensor, ...]:
        if self.tp is None:
            return latents
        if not self.sequence_parallel:
            return collectives.sum_gradients(self.tp.group, *latents)
        gathered = collectives.gather_rows(_side_by_side(latents), self.tp.group)
        return gathered.split([latent.shape[-1] for latent in latents], dim=-1)

    def from_heads(self, output: Tensor) -> Tensor:
        if self.tp is None:
            return output
        if self.sequence_parallel:
            return collectives.sum_and_scatter_rows(output, self.tp.group)
        return collectives.sum_over_ranks(output, self.tp.group)

    def to_every_rank(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not self.sequence_parallel or self.tp is None:
            return tensors
        gathered = collectives.gather_same_rows(torch.cat(tensors, dim=-1), self.tp.group)
        # Each in memory of its own: the caller may write in place, which views of one tensor forbid.
        return tuple(part.clone() for part in gathered.split([t.shape[-1] for t in tensors], dim=-1))

    def start_to_all_keys(self, *latents: Tensor) -> collectives.KeysOnTheWay | None:
        # Over tensor-parallel ranks all latents cross to the heads first, in one collective that needs the query's too.
        if self.cp is None or self.tp is not None or self.cp_comm_type is not None or torch.compiler.is_compiling():
            return None
        return collectives.KeysOnTheWay(_side_by_side(latents), self.cp.group)

    def to_all_keys(
        self, *latents: Tensor, order: KeyOrder | None, started: KeysUnderWay | None = None
    ) -> tuple[Tensor, ...]:
        if self.cp is None or order is None or self.cp_comm_type is not None:
            return latents
        if started is None:
            gathered = collectives.gather_keys(_side_by_side(latents), self.cp.group, order)
        else:
            gathered = started.finish(order)
        return gathered.split([latent.shape[-1] for latent in latents], dim=-1)

    def sum_over_context(self, value: Tensor) -> Tensor:
        return value if self.cp is None else collectives.sum_over_ranks(value, self.cp.group)

    def max_over_context(self, value: Tensor) -> Tensor:
        return value if self.cp is None else collectives.largest_over_ranks(value, self.cp.group)


def _side_by_side(latents: tuple[Tensor, ...]) -> Tensor:
    """The latents of a token as one row, in the dtype of the last: under autocast the norms answer in fp32, and what
    reads the latents would round them to it anyhow."""
    return latents[0] if len(latents) == 1 else torch.cat([latent.to(latents[-1].dtype) for latent in latents], dim=-1)


def _refuse_different(found: list[list[int]], dims: str, multiple: int) -> None:
    rows, batches, tp_sizes, cp_sizes = (list(numbers) for numbers in zip(*found, strict=True))
    for name, sizes in (("tp_group", tp_sizes), ("cp_group", cp_sizes)):
        if len(set(sizes)) > 1:
            raise ValueError(f"{name}: given groups of {sizes} ranks on the {dims} ranks, allowed is one size")
    if len(set(batches)) > 1:
        raise ValueError(
            f"hidden_states: given batch sizes {batches} on the {len(found)} {dims} ranks, allowed is one size"
        )
    if len(set(rows)) > 1:
        raise ValueError(
            f"hidden_states: given {rows} rows on the {len(found)} {dims} ranks, {sum(rows)} together; allowed is as "
            f"many on each, of a length that is a multiple of {multiple}"
        )
