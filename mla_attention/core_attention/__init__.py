"""Core attention back ends: softmax(q k^T * scale) v, causal, behind one interface."""

from mla_attention.core_attention.choose import BACKENDS, build_core_attention
from mla_attention.core_attention.interface import CoreAttention

__all__ = ["BACKENDS", "CoreAttention", "build_core_attention"]
