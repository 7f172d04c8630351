"""Transformer Engine, imported only by who asks for it, and why it cannot be used where it cannot.

An installation may be absent, an empty meta package, without its torch extension, unable to load a CUDA library, or
complete on a machine without a GPU; each raises something else at another place. Here each gives the same one line.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch  # before Transformer Engine, always: it loads the CUDA libraries that torch has loaded

_INSTALL = 'install it with pip install --no-build-isolation "mla-attention[te]" beside a CUDA build of torch'


def te_obstacle() -> str | None:
    """Why Transformer Engine cannot be used in this process, in one line; None where it can."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # ImportError, RuntimeError, OSError, AssertionError, FileNotFoundError: all seen
        found = " ".join(f"{type(error).__name__}: {error}".split())
        return f"Transformer Engine cannot be imported ({found[:200]}); {_INSTALL}"
    if not torch.cuda.is_available():
        return f"Transformer Engine {te_version()} is installed, but there is no CUDA GPU (torch {torch.__version__})"
    return None


def import_te() -> ModuleType:
    """`transformer_engine.pytorch`.

    Raises:
        ValueError: where it cannot be used, naming what was found and what is missing.
    """
    obstacle = te_obstacle()
    if obstacle is not None:
        raise ValueError(f"backend: given 'te', but {obstacle}; allowed here is 'torch'")
    return sys.modules["transformer_engine.pytorch"]


def te_version() -> str:
    """Version of the imported Transformer Engine."""
    return str(getattr(sys.modules.get("transformer_engine"), "__version__", "of unknown version"))
