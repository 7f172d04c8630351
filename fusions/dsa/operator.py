"""How the launches of the DSA kernels become torch operators of the namespace `mla_attention`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef, infer_schema

from ..rope.registry import on_device_of


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function of tensors as `mla_attention::name`; it runs with the device of its first argument current.

    Triton launches on the current device, whose stream and binary are not those of tensors on another one.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        def launch(first: Any, *others: Any, **named: Any) -> Any:
            with on_device_of(first):
                return function(first, *others, **named)

        schema = infer_schema(function, mutates_args=())
        return torch.library.custom_op(f"mla_attention::{name}", launch, mutates_args=(), schema=schema)

    return define
