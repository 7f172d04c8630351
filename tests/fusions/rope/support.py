"""Inputs, an independent fp64 oracle and measures of distance for the rotary tests.

These tests run under Triton's interpreter on a machine without a GPU, and on the GPU where there is one.
"""

from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLAGS: tuple[dict[str, bool], ...] = (
    {},
    {"inverse": True},
    {"remove_interleaving": True},
    {"rope_first": True},
    {"input_halves": True},
    {"inverse": True, "remove_interleaving": True, "rope_first": True},
    {"inverse": True, "input_halves": True, "rope_first": True},
)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False) -> Tensor:
    """Normal numbers on DEVICE, the same on every device."""
    generator = torch.Generator().manual_seed(seed + 1000003 * sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_(grad)


def tables(positions: int, emb_dim: int, dtype: torch.dtype = torch.float32, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Tables `[positions, 1, 1, emb_dim]` whose halves differ and whose magnitude is not 1."""
    angle = random(positions, 1, 1, emb_dim, seed=seed) * 3
    return (1.25 * angle.cos()).to(dtype), (1.25 * angle.sin()).to(dtype)


def rotation_matrix(
    cos: Tensor, sin: Tensor, inverse: bool = False, remove_interleaving: bool = False, input_halves: bool = False
) -> Tensor:
    """The rotation of table rows `[..., emb_dim]` written out as fp64 matrices `[..., emb_dim, emb_dim]`."""
    emb_dim = cos.shape[-1]
    half = emb_dim // 2
    cos, sin = cos.double(), sin.double() * (-1 if inverse else 1)
    matrix = torch.zeros(*cos.shape, emb_dim, dtype=torch.float64, device=cos.device)
    for i in range(half):
        a, b = (i, half + i) if input_halves else (2 * i, 2 * i + 1)
        left, right = (2 * i, 2 * i + 1) if remove_interleaving else (i, half + i)
        matrix[..., left, a] = cos[..., i]
        matrix[..., left, b] = -sin[..., i]
        matrix[..., right, b] = cos[..., half + i]
        matrix[..., right, a] = sin[..., half + i]
    return matrix


def oracle(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    nope_dim: int,
    emb_dim: int,
    positions: Tensor,
    *,
    transposed: bool = False,
    rope_first: bool = False,
    **flags: bool,
) -> Tensor:
    """fp64 result for `t` `[*tokens, n, d]` whose token i uses table row `positions[i]` (`positions` as the tokens)."""
    rows = positions.reshape(t.shape[:-2])
    matrix = rotation_matrix(cos.reshape(-1, emb_dim)[rows], sin.reshape(-1, emb_dim)[rows], **flags)
    if transposed:
        matrix = matrix.transpose(-1, -2)
    out = t.double().clone()
    rope = slice(0, emb_dim) if rope_first else slice(nope_dim, None)
    out[..., rope] = torch.einsum("...ij,...nj->...ni", matrix, t.double()[..., rope])
    return out


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance in units in the last place between two tensors of one dtype."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.isfinite().all()
    assert b.isfinite().all()
    if a.numel() == 0:
        return 0
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    lowest = torch.iinfo(bits).min

    def ordered(t: Tensor) -> Tensor:
        raw = t.detach().contiguous().view(bits).long()
        return torch.where(raw < 0, lowest - raw, raw)

    return int((ordered(a) - ordered(b)).abs().max())


def assert_rounded_once(got: Tensor, exact: Tensor, scale: Any = None) -> None:
    """`got` is the fp64 `exact` after fp32 arithmetic and one rounding.

    In fp32 cancellation makes units in the last place of the result meaningless; there the bound is 4 roundings of the
    largest term, `scale` (default: the largest magnitude).
    """
    if got.dtype == torch.float32:
        largest = exact.abs().max() if scale is None else scale
        assert (got.double() - exact).abs().max() <= 4 * 2.0**-24 * largest + 1e-40
    else:
        # A sum that cancels to below one unit of its terms carries their fp32 error.
        near_zero = 2.0**-20 * exact.abs().max()
        expected = exact.to(got.dtype)
        far = (got.double() - expected.double()).abs() > near_zero
        assert ulps(torch.where(far, got, expected), expected) <= 1


def sbhd_positions(s: int, b: int) -> Tensor:
    """Positions of `[S, B, ...]`."""
    return torch.arange(s, device=DEVICE)[:, None].expand(s, b)
