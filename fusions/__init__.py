"""Fused Triton kernels of multi-head latent attention behind plain functions.

Every function has an unfused twin with the same name and signature in `mla_attention.fusions.reference`. Names are
looked up when they are first used, so that importing the twins needs no Triton.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "fused_mla_rope_inplace": ".rope.inplace",
    "fused_mla_rope_out_of_place": ".rope.inplace",
    "mla_rope_apply_raw_": ".rope.raw",
    "mla_rope_unapply_raw": ".rope.raw",
    "fused_mla_rope_kv_split": ".rope.kv_split",
    "fused_mla_rope_concat": ".rope.concat",
    "fused_apply_mla_rope_for_q": ".rope.megatron_names",
    "fused_apply_mla_rope_for_kv": ".rope.megatron_names",
    "rotate_shared_key_into": ".rope.shared_key",
    "shared_key_gradient": ".rope.shared_key",
    "indexer_scores": ".dsa.indexer_scores",
    "topk_select": ".dsa.topk_select",
    "indexer_topk": ".dsa.indexer_topk",
    "sparse_mla": ".dsa.sparse_mla",
    "indexer_kl": ".dsa.indexer_kl",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_MODULE_OF[name], __name__)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError(
            f"{name} is a Triton kernel and triton is not installed here: use mla_attention.fusions.reference.{name}"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
