"""Launching the kernels of `key_value_kernels.py` on checked arguments."""

import math

from torch import Tensor

from .key_value_kernels import key_value_backward_kernel, key_value_kernel
from .positions import position_arguments
from .registry import blocks, on_device_of, padded, token_count, token_strides
from .tables import has_equal_halves


def key_value_blocks(emb_dim: int, k_dim: int, v_dim: int, heads: int, copy: bool) -> tuple[int, int, int]:
    """Tokens, heads and warps of a program, from the shape alone: the same on every rank and in every process.

    A program copies about 4096 padded channels with 4 warps, or writes as many rotary channels of the shared key alone.
    """
    channels = padded(k_dim) + padded(v_dim) if copy else padded(emb_dim)
    rows = int(2 ** min(7, max(0, round(math.log2(4096 / channels)))))
    block_heads = min(padded(heads), rows)
    return max(1, rows // block_heads), block_heads, 4


def sum_blocks(emb_dim: int, heads: int) -> tuple[int, int, int]:
    """Of a program that sums over heads: tokens, lanes of a token, and heads that a lane loads at once.

    For emb_dim 64 a thread of 4 warps has 8 channels of each half of one lane, or 4. With many heads two tokens are
    enough for a program, and their heads are shared out among lanes; with few heads there are more tokens, whose lanes
    then add up less.
    """
    rows = max(1, min(128, 2048 // padded(emb_dim)))
    tokens = min(rows, max(2, 128 // padded(heads)))
    lanes = min(padded(heads), max(8, padded(heads) // 8), rows // tokens)
    return tokens, lanes, min(4, padded(blocks(heads, lanes)))


def launch_key_value(
    kv: Tensor | None,
    k_pos_emb: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cp_rank: int = 0,
    cp_size: int = 1,
    remove_interleaving: bool = False,
    *,
    backward: bool = False,
    block_tokens: int | None = None,
    block_heads: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Launch the split (`kv` and `value` given) or the shared key alone (both None), forward or backward.

    Args:
        kv: `[.., n, k_dim + v_dim]`, read; its gradient, written, in backward.
        k_pos_emb: `[.., 1, emb_dim]`, read; its gradient, written, in backward.
        key: `[.., n, k_dim + emb_dim]`, written; its gradient, read, in backward.
        value: `[.., n, v_dim]`, written; its gradient, read, in backward.
        cos: cosine table with contiguous rows.
        sin: sine table likewise.
        cu_seqlens: global offsets, or None.
        position_ids: explicit table rows, or None.
        emb_dim: rotary width.
        k_dim: width of a head's unrotated key.
        v_dim: width of a head's value.
        cp_rank: context-parallel rank.
        cp_size: context-parallel size.
        remove_interleaving: whether the key holds the pairs interleaved.
        backward: the transposed pass.
        block_tokens: tokens a program, of both kinds in backward, to force them; a power of two.
        block_heads: heads a program, to force them; a power of two.
        num_warps: warps a program, to force them.
    """
    tokens, heads = token_count(key), key.shape[-2]
    if tokens == 0:
        return
    copy = kv is not None and value is not None
    ends = (kv if kv is not None else key, k_pos_emb, key, value if value is not None else key)
    strides = [token_strides(t) for t in ends]
    batch = key.shape[1] if key.ndim == 4 else 1
    batched = batch > 1 and any(s != batch * b for s, b, _ in strides)
    if batch > 1 and not batched:
        strides = [(b, 0, h) for _, b, h in strides]
    positions, rule = position_arguments(key.shape[:-2], cu_seqlens, cp_rank, cp_size, position_ids)
    chosen = key_value_blocks(emb_dim, k_dim, v_dim, heads, copy)
    block_t, block_h, warps = block_tokens or chosen[0], block_heads or chosen[1], num_warps or chosen[2]
    kernel, programs, sums = key_value_kernel, blocks(tokens, block_t) * blocks(heads, block_h), {}
    if backward:
        sum_t, lanes, at_once = sum_blocks(emb_dim, heads)
        sum_t = block_tokens or sum_t
        group = max(sum_t, block_t) if copy else sum_t
        parts = group // sum_t + (group // block_t * blocks(heads, block_h) if copy else 0)
        kernel, programs = key_value_backward_kernel, blocks(tokens, group) * parts
        sums = {"GROUP_T": group, "SUM_T": sum_t, "LANES": lanes, "AT_ONCE": at_once}
    with on_device_of(key):
        kernel[(programs,)](
            *ends,
            cos,
            sin,
            positions["p_offsets"],
            positions["p_ids"],
            tokens,
            batch,
            positions["tokens_per_row"],
            positions["n_sequences"],
            positions["search_steps"],
            cos.shape[0],
            positions["cp_rank"],
            positions["cp_size"],
            cos.stride(0),
            sin.stride(0),
            *strides[0],
            *strides[1][:2],
            *strides[2],
            *strides[3],
            HEADS=heads,
            EMB=emb_dim,
            EMB_PADDED=padded(emb_dim),
            K=k_dim,
            K_PADDED=padded(k_dim),
            V=v_dim,
            V_PADDED=padded(v_dim),
            COPY=copy,
            BATCHED=batched,
            POSITIONS=rule,
            EQUAL_HALVES=has_equal_halves(cos, sin),
            HALVES=not remove_interleaving,
            **sums,
            BLOCK_T=block_t,
            BLOCK_H=block_h,
            num_warps=warps,
            enable_fp_fusion=False,  # the unfused twin rounds products too
        )
