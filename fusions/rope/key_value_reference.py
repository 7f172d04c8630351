"""Key and value from the up-projection and the shared rotary key, in plain torch.

    key   [.., n, k_dim + emb_dim] = k_nope | rotate(k_pos_emb), the same for every head
    value [.., n, v_dim]

The rotated shared key is expanded to the heads before it is rounded, so that autograd sums the heads' gradients in
fp32, rotates the sum back in fp32 and rounds it once, which is what the kernels do.
"""

import torch
from torch import Tensor

from ..host_checks import check_floating, check_layout, check_pairing, check_same_rows, check_widths
from .rope_reference import checked_table_rows, compute_dtype, rotate, rotate_transposed


def fused_mla_rope_kv_split(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Split `kv` and append the rotated shared rotary key to every head's key.

    Args:
        kv: `[S, B, n, k_dim + v_dim]`, or packed `[T, n, k_dim + v_dim]` with `cu_seqlens_kv`.
        k_pos_emb: `[S, B, 1, emb_dim]` or `[T, 1, emb_dim]`, same dtype.
        cos: cosines, `[positions, 1, 1, emb_dim]`, any floating dtype.
        sin: sines, likewise.
        emb_dim: rotary width, even.
        k_dim: width of a head's unrotated key.
        v_dim: width of a head's value.
        cu_seqlens_kv: global offsets int32/int64 `[sequences + 1]` of a packed batch.
        cp_rank: context-parallel rank (packed only).
        cp_size: context-parallel size (packed only).
        rotary_interleaved: must be False.
        remove_interleaving: write pairs back interleaved instead of in halves.
        position_ids: `[T]`, `[S]` or `[S*B]`: table rows that override all other rules.

    Returns:
        key `[..., n, k_dim + emb_dim]` and value `[..., n, v_dim]`, new and contiguous.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: Megatron-LM's fused_mla_yarn_rope_apply.
    """
    check_widths(emb_dim, k_dim=k_dim, v_dim=v_dim)
    check_pairing(rotary_interleaved, remove_interleaving)
    check_floating(False, kv=kv, k_pos_emb=k_pos_emb)
    widths = f"k_dim {k_dim} + v_dim {v_dim}"
    check_layout("kv", kv, k_dim + v_dim, widths, "cu_seqlens_kv", cu_seqlens_kv, position_ids)
    check_same_rows("k_pos_emb", k_pos_emb, "one head of kv", kv[..., :1, :])
    check_layout("k_pos_emb", k_pos_emb, emb_dim, "emb_dim", "cu_seqlens_kv", cu_seqlens_kv, position_ids)
    rows = checked_table_rows(kv, cos, sin, emb_dim, "cu_seqlens_kv", cu_seqlens_kv, cp_rank, cp_size, position_ids)
    k_nope, value = kv.split((k_dim, v_dim), -1)
    rotated = rotate(k_pos_emb, *rows, remove_interleaving=remove_interleaving)
    heads = rotated.expand(*k_nope.shape[:-1], emb_dim).to(kv.dtype)
    return torch.cat((k_nope, heads), -1), value.contiguous()


def fused_apply_mla_rope_for_kv(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Megatron-LM's name for `fused_mla_rope_kv_split`.

    Formula, Args, Returns, Raises: as `fused_mla_rope_kv_split`.

    Source: megatron-core 0.19.2.
    """
    return fused_mla_rope_kv_split(
        kv,
        k_pos_emb,
        cos,
        sin,
        emb_dim,
        k_dim,
        v_dim,
        cu_seqlens_kv,
        cp_rank,
        cp_size,
        rotary_interleaved,
        remove_interleaving,
        position_ids,
    )


@torch.no_grad()
def rotate_shared_key_into(
    key: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Write the rotated shared rotary key into the last channels of every head of `key`, outside autograd.

    Args:
        key: `[S, B, n, d + emb_dim]` or packed `[T, n, d + emb_dim]`; its first d channels are left alone.
        k_pos_emb: `[S, B, 1, emb_dim]` or `[T, 1, emb_dim]`, same dtype.
        Others: as `fused_mla_rope_kv_split`.

    Returns:
        `key`.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: the key layout of DeepSeek-V2 (one rotary key shared by the heads).
    """
    emb_dim = k_pos_emb.shape[-1]
    check_widths(emb_dim, nope_dim=key.shape[-1] - emb_dim)
    check_floating(False, key=key, k_pos_emb=k_pos_emb)
    check_layout("key", key, key.shape[-1], "any width", "cu_seqlens", cu_seqlens, position_ids)
    check_same_rows("k_pos_emb", k_pos_emb, "one head of key", key[..., :1, :])
    rows = checked_table_rows(key, cos, sin, emb_dim, "cu_seqlens", cu_seqlens, cp_rank, cp_size, position_ids)
    rotated = rotate(k_pos_emb, *rows, remove_interleaving=remove_interleaving)
    key[..., key.shape[-1] - emb_dim :] = rotated.to(key.dtype)
    return key


@torch.no_grad()
def shared_key_gradient(
    dkey: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
) -> Tensor:
    """The gradient of the shared rotary key: the heads' sum, rotated back and rounded once.

    Args:
        dkey: gradient of the key, `[S, B, n, d + emb_dim]` or packed `[T, n, d + emb_dim]`.
        Others: as `fused_mla_rope_kv_split`; emb_dim is the width of the tables.

    Returns:
        `[S, B, 1, emb_dim]` or `[T, 1, emb_dim]` in the dtype of `dkey`.

    Raises:
        ValueError: naming the argument that does not fit.

    Source: the transpose of `rotate_shared_key_into`.
    """
    emb_dim = cos.shape[-1]
    check_widths(emb_dim, nope_dim=dkey.shape[-1] - emb_dim)
    check_floating(False, dkey=dkey)
    check_layout("dkey", dkey, dkey.shape[-1], "any width", "cu_seqlens", cu_seqlens, position_ids)
    rows = checked_table_rows(dkey, cos, sin, emb_dim, "cu_seqlens", cu_seqlens, cp_rank, cp_size, position_ids)
    heads = dkey[..., dkey.shape[-1] - emb_dim :].sum(-2, keepdim=True, dtype=compute_dtype(dkey))
    return rotate_transposed(heads, *rows, remove_interleaving=remove_interleaving).to(dkey.dtype)
