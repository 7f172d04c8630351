"""The unfused twins: the same names and signatures as `mla_attention.fusions`, in plain torch.

They are differentiable, run on any device and in fp64 for fp64 input, and are the specification that the kernels are
tested against. No twin needs Triton.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "fused_mla_rope_inplace": ".rope.rope_reference",
    "fused_mla_rope_out_of_place": ".rope.rope_reference",
    "mla_rope_apply_raw_": ".rope.rope_reference",
    "mla_rope_unapply_raw": ".rope.rope_reference",
    "fused_mla_rope_kv_split": ".rope.key_value_reference",
    "fused_mla_rope_concat": ".rope.rope_reference",
    "fused_apply_mla_rope_for_q": ".rope.rope_reference",
    "fused_apply_mla_rope_for_kv": ".rope.key_value_reference",
    "rotate_shared_key_into": ".rope.key_value_reference",
    "shared_key_gradient": ".rope.key_value_reference",
    "indexer_scores": ".dsa.selection_reference",
    "topk_select": ".dsa.selection_reference",
    "indexer_topk": ".dsa.selection_reference",
    "sparse_mla": ".dsa.attention_reference",
    "indexer_kl": ".dsa.attention_reference",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __package__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
