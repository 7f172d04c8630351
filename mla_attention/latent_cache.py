"""Cache of past tokens for generation: normed latent and rotated shared key, 576 channels a token for DeepSeek."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_attention.argument_checks import as_device, check_dtype, check_int, check_kind
from mla_attention.configs import MLAConfig


class LatentCache:
    """Past tokens of one layer, `[max_length, B, Rkv+Dr]` (dsa: also the indexer keys `[max_length, B, Di]`).

    Entries are stored detached: gradients do not flow into tokens of earlier forwards.

    Args:
        config: the layer's config.
        batch_size: B.
        max_length: tokens that fit.
        device, dtype: of the entries; best those of the layer's activations, since others are converted in each step.

    Raises:
        ValueError: naming the argument that is of another kind or out of range.

    Source: the cache of DeepSeek-V2 (arXiv 2405.04434, section 2.1), and of the indexer of DeepSeek-V3.2.
    """

    def __init__(
        self, config: MLAConfig, batch_size: int, max_length: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        check_kind("config", config, MLAConfig, required=True)
        check_int("batch_size", batch_size, 1)
        check_int("max_length", max_length, 1)
        check_dtype(dtype)
        device = as_device(device)
        self.batch_size = batch_size
        self.max_length = max_length
        self.length = 0
        self.widths = _widths(config)
        width, index_width = self.widths
        self.keys = torch.empty(max_length, batch_size, width, device=device, dtype=dtype)
        self.index_keys: Tensor | None = None
        if index_width is not None:
            self.index_keys = torch.empty(max_length, batch_size, index_width, device=device, dtype=dtype)

    def check(self, new_rows: int, batch_size: int, config: MLAConfig) -> None:
        """Refuse a forward that this cache cannot take.

        Args:
            new_rows, batch_size: S and B of the forward.
            config: the layer's.

        Raises:
            ValueError: if the layer's keys are of other widths, the batch differs, or the new tokens do not fit.
        """
        for name, built, allowed in zip(("keys", "indexer keys"), self.widths, _widths(config), strict=True):
            if built != allowed:
                raise ValueError(f"cache: built for {name} of width {built}, allowed is this layer's width {allowed}")
        if batch_size != self.batch_size:
            raise ValueError(
                f"cache: built for batch size {self.batch_size}, given hidden_states of batch size {batch_size}"
            )
        if self.length + new_rows > self.max_length:
            raise ValueError(
                f"cache: holds {self.length} tokens and is given {new_rows} more, "
                f"allowed are {self.max_length} (max_length)"
            )

    def append(self, keys: Tensor, index_keys: Tensor | None = None) -> None:
        """Store the keys of new tokens.

        Args:
            keys: `[S, B, Rkv+Dr]`, latent (normed) then rotated shared key.
            index_keys: `[S, B, Di]`, rotated indexer keys, for a dsa layer that has an indexer.
        """
        end = self.length + keys.shape[0]
        self.keys[self.length : end] = keys.detach()
        if self.index_keys is not None and index_keys is not None:
            self.index_keys[self.length : end] = index_keys.detach()
        self.length = end

    def entries(self) -> tuple[Tensor, Tensor | None]:
        """Keys `[length, B, Rkv+Dr]` and indexer keys `[length, B, Di]` (None without an indexer), as views."""
        return self.keys[: self.length], None if self.index_keys is None else self.index_keys[: self.length]

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        self.length = 0

    def __repr__(self) -> str:
        return f"LatentCache(length={self.length}, max_length={self.max_length}, batch_size={self.batch_size})"


def _widths(config: MLAConfig) -> tuple[int, int | None]:
    """Channels of a key and of an indexer key, None for a layer without an indexer."""
    return (
        config.kv_lora_rank + config.qk_pos_emb_head_dim,
        None if config.dsa_indexer_shared else config.dsa_indexer_head_dim,
    )
