"""Linear and norm layers of each back end, behind one small interface."""

from __future__ import annotations

import torch

from mla_attention.layers.torch_layers import TorchLayers

BACKENDS = ("torch", "te")


def build_layers(backend: str, device: torch.device | str | None, dtype: torch.dtype | None) -> TorchLayers:
    """The layer builder of a back end.

    Raises:
        ValueError: if `backend` names none.
    """
    if backend == "torch":
        return TorchLayers(device, dtype)
    if backend == "te":
        from mla_attention.layers.te_layers import TELayers

        return TELayers(device, dtype)
    raise ValueError(f"backend: given {backend!r}, allowed are {', '.join(map(repr, BACKENDS))}")
