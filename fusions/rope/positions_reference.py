"""Which row of the cos/sin tables a token uses, in plain torch.

sbhd  `[S, B, ...]`: position = s. The caller cuts the table for its context-parallel rank.
thd   `[T, ...]` with global offsets cu_seqlens: the local offsets are cu_seqlens // cp_size; a token at offset `off`
      of a sequence with local length L uses row `off` without context parallelism and otherwise, with f = ceil(L/2)
      and s = floor(L/2), row `off + rank*f` in the first half and `off - f + size*f + (size-rank-1)*s` in the second.
      The global sequence is so cut into 2*size chunks of which rank r holds chunks r and 2*size-1-r.
Rows past the last offset (the padding of a captured graph) use row 0. Empty sequences hold no token.
"""

import torch
from torch import Tensor


def packed_positions(cu_seqlens: Tensor, tokens: int, cp_rank: int = 0, cp_size: int = 1) -> Tensor:
    """Position of each of the rank's packed tokens within its own sequence.

    Args:
        cu_seqlens: global offsets, int32/int64 `[sequences + 1]`.
        tokens: number of local rows T; rows past `cu_seqlens[-1] // cp_size` get position 0.
        cp_rank: rank in the context-parallel group.
        cp_size: size of the context-parallel group.

    Returns:
        int64 `[T]` on the device of `cu_seqlens`. No host-device synchronisation takes place.

    Source: the zigzag layout of Megatron-LM's context parallelism, with its dev branch's rule for odd local lengths.
    """
    bounds = torch.div(cu_seqlens.long(), cp_size, rounding_mode="floor")
    token = torch.arange(tokens, device=cu_seqlens.device)
    # The last sequence that starts at or before the token: empty ones start there too, and end there.
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    last = bounds.shape[0] - 1
    start = bounds[sequence]
    length = bounds[(sequence + 1).clamp(max=last)] - start
    offset = token - start
    if cp_size > 1:
        first = torch.div(length + 1, 2, rounding_mode="floor")
        second = length - first
        late = offset - first + cp_size * first + (cp_size - cp_rank - 1) * second
        offset = torch.where(offset < first, offset + cp_rank * first, late)
    return torch.where(sequence >= last, torch.zeros_like(offset), offset)


def table_rows(
    tables: tuple[Tensor, Tensor],
    token_shape: torch.Size,
    cu_seqlens: Tensor | None,
    cp_rank: int,
    cp_size: int,
    position_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The cos and sin row of each token, shaped to broadcast against `[*token_shape, heads, emb_dim]`.

    Args:
        tables: cos and sin, `[rows, ..., emb_dim]` with every dimension between of size 1.
        token_shape: `(S, B)` or `(T,)`.
        cu_seqlens: global offsets of a packed batch, or None.
        cp_rank: rank in the context-parallel group (packed only).
        cp_size: size of the context-parallel group (packed only).
        position_ids: `[T]`, `[S]` or `[S*B]`; overrides the other rules.

    Returns:
        cos and sin, `[S, 1 or B, 1, emb_dim]` or `[T, 1, emb_dim]`.
    """
    emb_dim = tables[0].shape[-1]
    tokens = token_shape.numel()
    if position_ids is not None:
        per_token = position_ids.numel() == tokens
        shape = (*token_shape, 1, emb_dim) if per_token else (token_shape[0], 1, 1, emb_dim)
        rows = position_ids.long()
    elif cu_seqlens is not None:
        rows = packed_positions(cu_seqlens, tokens, cp_rank, cp_size)
        shape = (*token_shape, 1, emb_dim)
    else:
        return tuple(t[: token_shape[0]].reshape(token_shape[0], 1, 1, emb_dim) for t in tables)  # type: ignore[return-value]
    return tuple(t.reshape(-1, emb_dim)[rows].reshape(shape) for t in tables)  # type: ignore[return-value]
