"""Tables that are known to repeat themselves, cos[p] = [f | f]: of those the kernels read one half.

Whoever builds a table may say so with `mark_equal_halves`. The mark is an attribute that names the tensor object and
its version: another object on the same memory and a copy do not have it, a table changed in place since then has an
older one, and both halves are read, to the same bits. With one head a fp32 table is two thirds of what a rotation
moves, so a half of it counts.

What torch does not count as a change is not seen here either: writes through `.data` or `.numpy()`, and replays of a
CUDA graph, which read what was decided at capture.
"""

import torch
from torch import Tensor

_MARK = "_has_equal_halves"  # (id, version) of the tensor that is marked


def mark_equal_halves(table: Tensor) -> Tensor:
    """Say that `table[..., :emb_dim/2]` and `table[..., emb_dim/2:]` hold the same values, and return it."""
    if not table.is_inference():  # such a tensor does not count its versions
        setattr(table, _MARK, (id(table), table._version))
    return table


def has_equal_halves(*tables: Tensor) -> bool:
    """Whether all of the tables were marked and are as they were then."""
    if torch.compiler.is_compiling():  # a traced tensor has no attributes
        return False
    return all(not t.is_inference() and getattr(t, _MARK, None) == (id(t), t._version) for t in tables)


def with_mark_of(table: Tensor, rows: Tensor) -> Tensor:
    """`rows` of the table, marked where that is."""
    return mark_equal_halves(rows) if has_equal_halves(table) else rows
