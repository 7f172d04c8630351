"""Megatron-LM's two names: a file that calls its fused_mla_yarn_rope_apply works after the import is swapped."""

from torch import Tensor

from ..host_checks import megatron_widths
from .inplace import fused_mla_rope_inplace
from .kv_split import fused_mla_rope_kv_split


def fused_apply_mla_rope_for_q(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_head_dim: int | None = None,
    emb_dim: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: Tensor | None = None,
    rope_first: bool = False,
    input_halves: bool = False,
    *,
    nope_dim: int | None = None,
) -> Tensor:
    """`fused_mla_rope_inplace` under Megatron-LM's name; the fourth argument is `qk_head_dim` or `nope_dim`.

    Formula, Args, Returns: as `fused_mla_rope_inplace`.

    Raises:
        ValueError: unless exactly one of the two names, and `emb_dim`, is given; and as `fused_mla_rope_inplace`.

    Source: megatron-core 0.19.2 (`qk_head_dim`) and Megatron-LM's dev branch (`nope_dim`).
    """
    nope, emb = megatron_widths(qk_head_dim, nope_dim, emb_dim)
    return fused_mla_rope_inplace(
        t,
        cos,
        sin,
        nope,
        emb,
        cu_seqlens_q,
        cp_rank,
        cp_size,
        rotary_interleaved,
        inverse,
        remove_interleaving,
        position_ids,
        rope_first,
        input_halves,
    )


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
    """`fused_mla_rope_kv_split` under Megatron-LM's name.

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
