"""FP8 weights with one scale per tile, as DeepSeek-V3 and GLM-5 publish them.

    weight[r, c] = float32(fp8[r, c]) * scale_inv[r // block_rows, c // block_cols]

The last tile of a dimension may be cut short: 576 rows of 128-row tiles have five scale rows, the fifth covers 64 rows.
Source: `weight_dequant` and `weight_block_size` of the DeepSeek-V3 release.
"""

import torch
from torch import Tensor

from mla_attention.checkpoint.files import Box, LazyTensor

SCALE_SUFFIX = "_scale_inv"
FP8_DTYPE = torch.float8_e4m3fn


class BlockScaled:
    """An FP8 weight and its tile scales, read as fp32; any box is right, also one that starts inside a tile."""

    def __init__(self, weight: LazyTensor, scale: LazyTensor, block_size: tuple[int, int]) -> None:
        self.weight = weight
        self.scale = scale
        self.block_size = block_size
        self.shape = weight.shape
        self.dtype = torch.float32

    def read(self, box: Box) -> Tensor:
        """Return the dequantised box; only the box and the scales of the tiles that it touches are read."""
        starts = [side.start // block for side, block in zip(box, self.block_size, strict=True)]
        stops = [-(-side.stop // block) for side, block in zip(box, self.block_size, strict=True)]
        scale = self.scale.read(tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True)))
        values = self.weight.read(box).to(torch.float32)
        scale = scale.to(values)
        for dim, (side, block, start) in enumerate(zip(box, self.block_size, starts, strict=True)):
            tile = torch.arange(side.start, side.stop, device=scale.device) // block - start
            scale = scale.index_select(dim, tile)
        return values * scale


def scale_shape(shape: tuple[int, ...], block_size: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight: ceil(size / block) per dimension."""
    return tuple(-(-size // block) for size, block in zip(shape, block_size, strict=True))


def check_block_size(block_size: tuple[int, int]) -> None:
    """Refuse a block size that is not two positive integers.

    Raises:
        ValueError: naming what was given.
    """
    good = isinstance(block_size, (tuple, list)) and len(block_size) == 2
    if not good or not all(type(size) is int and size > 0 for size in block_size):
        raise ValueError(f"block_size must be two positive ints (rows, columns of a tile), got {block_size!r}")
