"""Megatron-LM's own MLA layers on our fused RoPE kernels: `patch()` and `unpatch()`.

Megatron-core 0.19.2 rotates through `fused_apply_mla_rope_for_q` and `fused_apply_mla_rope_for_kv`, and its layers hold
them by `from ... import`. `patch()` replaces both names in every module that holds them. What it replaced is kept on
those modules, so `unpatch()` finds it there.

With ours, head dims need not be powers of two (GLM-5's 192 does not compile in Megatron's kernels) and head counts not
multiples of a block. Megatron's config asks for `rope_type="yarn"` with `apply_rope_fusion`: plain RoPE is yarn with
`rotary_scaling_factor=1.0`. It forbids the fusion for its own sparse attention.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

_NAMES = ("fused_apply_mla_rope_for_q", "fused_apply_mla_rope_for_kv")
_HOME = "megatron.core.fusions.fused_mla_yarn_rope_apply"
_IMPORTERS = (
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla",
)
_SUPPORTED = ("0.19.2",)
_KEPT = "_functions_before_mla_attention"  # on a patched module: its own functions by name


def patch() -> list[str]:
    """Make an installed megatron-core rotate through our fused kernels.

    Patching again changes nothing. Modules imported later find our functions where they import them from.

    Returns:
        Every symbol that has been replaced, now or before, as "module.function", sorted.

    Raises:
        RuntimeError: if megatron-core is absent or cannot be imported, is a release that was not checked, or Triton is
            absent; nothing is replaced then.
    """
    from mla_attention import fusions

    home = _home()
    ours = {name: getattr(fusions, name) for name in _NAMES}
    for name in _IMPORTERS:
        with contextlib.suppress(Exception):  # a part of Megatron that this machine cannot load needs no patch
            importlib.import_module(name)
    theirs = getattr(home, _KEPT, None) or {name: getattr(home, name) for name in _NAMES}
    for module in _modules():
        held = {name: theirs[name] for name in _NAMES if vars(module).get(name) is theirs[name]}
        if held:
            setattr(module, _KEPT, {**vars(module).get(_KEPT, {}), **held})
            _assign(module, {name: ours[name] for name in held})
    return sorted(f"{module.__name__}.{name}" for module in _modules() for name in vars(module).get(_KEPT, ()))


def unpatch() -> list[str]:
    """Give megatron-core its own functions back.

    Returns:
        Every symbol that is Megatron's again, as "module.function", sorted; none where nothing was patched.
    """
    home = sys.modules.get(_HOME)
    theirs = {} if home is None else vars(home).get(_KEPT, {})
    restored = []
    for module in _modules():
        held = vars(module).pop(_KEPT, {})
        if module.__name__.startswith("megatron."):  # also what was imported while patched
            held = held | {name: theirs[name] for name in theirs if vars(module).get(name) is _our(name)}
        _assign(module, held)
        restored += [f"{module.__name__}.{name}" for name in held]
    return sorted(restored)


def _home() -> ModuleType:
    """Megatron's module of fused RoPE functions, of a release that was checked."""
    try:
        core = importlib.import_module("megatron.core")
        found = str(core.__version__)
        home = importlib.import_module(_HOME)
    except Exception as error:  # absent, or one of its own imports fails
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise RuntimeError(
            f"megatron-core cannot be imported ({reason}); supported is megatron-core {', '.join(_SUPPORTED)}"
        ) from error
    if found.split("+")[0] not in _SUPPORTED:
        raise RuntimeError(f"megatron-core: found {found}, supported is {', '.join(_SUPPORTED)}; nothing was patched")
    return home


def _our(name: str) -> Callable:
    from mla_attention import fusions

    return getattr(fusions, name)


def _modules() -> Iterator[ModuleType]:
    yield from [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _assign(module: ModuleType, functions: dict[str, Callable]) -> None:
    for name, function in functions.items():
        setattr(module, name, function)
