"""A process group as a layer holds it: shared by deep copies, known by its name and ranks in a pickle."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from mla_attention.parallel.collectives import sum_gradients


class RankGroup:
    """A process group of more than one rank that this process is in.

    Deep copies of a layer share it. A pickle keeps its name and ranks; where the same ranks have started the same group
    again it is found by these at its first use, elsewhere that use raises.

    Args:
        group: the process group.
        name: of the argument it came from, for messages.

    Raises:
        ValueError: if this process is not in the group.
    """

    def __init__(self, group: ProcessGroup, name: str) -> None:
        if not isinstance(group, ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError(f"{name}: given {group!r}, allowed is a process group that this process belongs to")
        self.name = name
        self.group_name = group.group_name
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self._group: ProcessGroup | None = group

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: after unpickling, where no group has this name and these ranks.
        """
        if self._group is None:
            self._group = self._find()
        return self._group

    def _find(self) -> ProcessGroup:
        try:
            found = _resolve_process_group(self.group_name)
            if tuple(dist.get_process_group_ranks(found)) == self.ranks and dist.get_rank(found) == self.rank:
                return found
        except (RuntimeError, ValueError, LookupError):
            found = None
        raise RuntimeError(
            f"{self.name}: this layer was pickled as rank {self.rank} of the ranks {list(self.ranks)}, and this "
            "process has no such group; start the same groups, or load the weights into a layer parallelized here"
        )

    def __deepcopy__(self, memo: dict) -> RankGroup:
        return self

    def __getstate__(self) -> dict:
        return {**vars(self), "_group": None}

    def __repr__(self) -> str:
        return f"{self.name}(ranks={list(self.ranks)})"


class GradientSum:
    """The identity whose gradient is summed over groups: what a layer does to parameters of which each rank's gradient
    covers only the tokens that the rank sees."""

    def __init__(self, *groups: RankGroup) -> None:
        self.groups = groups

    def __call__(self, parameter: Tensor) -> Tensor:
        for group in self.groups:
            (parameter,) = sum_gradients(group.group, parameter)
        return parameter

    def __repr__(self) -> str:
        return f"GradientSum({', '.join(map(repr, self.groups))})"
