"""Rotary tables: plain RoPE and YaRN, computed in fp64 and kept in fp32.

    f_extra[i] = base^(-2i/dim)                            i = 0 .. dim/2-1
    f_inter[i] = f_extra[i] / factor
    f[i]       = f_inter[i]*ramp[i] + f_extra[i]*(1 - ramp[i])      (YaRN; plain RoPE uses f_extra)
    cos[p]     = c * cos(p*[f | f]),  sin[p] = c * sin(p*[f | f])   (c = 1 for plain RoPE)

The tables are not module buffers: no `.bfloat16()`, `.to_empty()` or state dict ever touches them. All layers that
share the parameters share one table for each device, in the bounded cache at the end of this file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_attention.argument_checks import as_device, check_int, check_number
from mla_attention.fusions.rope.tables import mark_equal_halves, with_mark_of

if TYPE_CHECKING:
    from mla_attention.configs import MLAConfig

# Positions; tables grow by doubling, so a sequence that grows rebuilds a logarithmic number of times.
_SMALLEST_TABLE = 1024
LONGEST_TABLE = 2**24  # far beyond any context; what asks for more is a mistake, and would take all memory first


class RotaryEmbedding:
    """cos/sin tables of plain RoPE.

    Args:
        dim: rotary channels of one head (even).
        base: `rotary_base`, the theta of the frequencies.

    Raises:
        ValueError: if dim is not a positive even int, or base is not a finite number above 1.

    Source: Su et al., RoFormer (arXiv 2104.09864).
    """

    amplitude = 1.0  # factor that multiplies cos and sin

    def __init__(self, dim: int, base: float) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim <= 0 or dim % 2:
            raise ValueError(f"dim: given {dim!r}, allowed are positive even numbers (channels rotate in pairs)")
        check_number("base", base, above=1)
        self.dim = dim
        self.base = float(base)

    @property
    def inv_freq(self) -> Tensor:
        """Frequencies f[i] in radians per position, fp64 `[dim/2]`."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim
        return self.base**-exponent

    def cos_sin(
        self, length: int, *, device: torch.device | str, cp_rank: int = 0, cp_size: int = 1, packed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Tables for `length` positions.

        Args:
            length: positions of the whole sequence, before any cut for context parallelism.
            device: where the tables live.
            cp_rank, cp_size: with cp_size > 1 and not packed, only the rows of this rank's two zigzag chunks
                (chunks cp_rank and 2*cp_size-1-cp_rank of 2*cp_size).
            packed: packed sequences are positioned row by row by the kernels, which want the uncut table.

        Returns:
            (cos, sin), fp32 `[L, 1, 1, dim]`, L = length, or length/cp_size where the table is cut.

        Raises:
            ValueError: for a length below 0, too long or not divided by the cut, and a cp_rank outside cp_size.
        """
        check_int("length", length, 0)
        if length > LONGEST_TABLE:
            raise ValueError(f"length: given {length}, allowed are at most {LONGEST_TABLE} positions")
        check_int("cp_size", cp_size, 1)
        check_int("cp_rank", cp_rank, 0)
        if not 0 <= cp_rank < cp_size:
            raise ValueError(f"cp_rank: given {cp_rank}, allowed are 0..{cp_size - 1} (cp_size is {cp_size})")
        cos, sin = _shared_table(self, length, as_device(device))
        if cp_size == 1 or packed:
            return with_mark_of(cos, cos[:length]), with_mark_of(sin, sin[:length])
        if length % (2 * cp_size):
            raise ValueError(f"length: given {length}, allowed are multiples of 2*cp_size = {2 * cp_size}")
        chunk = length // (2 * cp_size)
        first, second = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
        return (
            with_mark_of(cos, torch.cat([cos[first : first + chunk], cos[second : second + chunk]])),
            with_mark_of(sin, torch.cat([sin[first : first + chunk], sin[second : second + chunk]])),
        )

    @property
    def key(self) -> tuple:
        """Everything that the tables depend on; equal keys share a table."""
        return ("rope", self.dim, self.base)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"


class YarnRotaryEmbedding(RotaryEmbedding):
    """cos/sin tables of YaRN: low frequencies interpolated, high ones kept, a ramp between them.

    Args:
        dim, base: as for plain RoPE.
        factor: context extension, >= 1.
        original_max_position_embeddings: length that the model was first trained on.
        beta_fast, beta_slow: rotations over that length at which the ramp starts and ends.
        mscale, mscale_all_dim: the tables are multiplied by g(factor, mscale) / g(factor, mscale_all_dim).
        truncate: round the ramp's ends to whole channels.
        attention_factor: multiplies the tables in place of that ratio, where given.

    Raises:
        ValueError: as for plain RoPE, for a factor below 1, an original length not above 0, or betas out of order.

    Source: Peng et al., YaRN (arXiv 2309.00071), with the magnitude split of DeepSeek-V2 (arXiv 2405.04434).
    """

    def __init__(
        self,
        dim: int,
        base: float,
        factor: float,
        original_max_position_embeddings: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        truncate: bool = True,
        attention_factor: float | None = None,
    ) -> None:
        super().__init__(dim, base)
        check_number("factor", factor, least=1)
        check_number("original_max_position_embeddings", original_max_position_embeddings, above=0)
        check_number("beta_fast", beta_fast, above=0)
        check_number("beta_slow", beta_slow, above=0)
        check_number("mscale", mscale, least=0)
        check_number("mscale_all_dim", mscale_all_dim, least=0)
        if not isinstance(truncate, bool):
            raise ValueError(f"truncate: given {truncate!r}, allowed are True and False")
        if attention_factor is not None:
            check_number("attention_factor", attention_factor, above=0)
        if not beta_fast >= beta_slow:
            raise ValueError(
                f"beta_fast, beta_slow: given {beta_fast}, {beta_slow}, allowed is beta_fast >= beta_slow > 0"
            )
        self.factor = float(factor)
        self.original_max_position_embeddings = original_max_position_embeddings
        self.beta_fast = float(beta_fast)
        self.beta_slow = float(beta_slow)
        self.mscale = float(mscale)
        self.mscale_all_dim = float(mscale_all_dim)
        self.truncate = truncate
        self.attention_factor = attention_factor

    @property
    def key(self) -> tuple:
        """Everything that the tables depend on; equal keys share a table."""
        ramp = (self.factor, self.original_max_position_embeddings, self.beta_fast, self.beta_slow, self.truncate)
        return ("yarn", self.dim, self.base, *ramp, self.amplitude)

    @property
    def amplitude(self) -> float:  # type: ignore[override]
        """Factor c on cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_get_mscale(self.factor, self.mscale) / yarn_get_mscale(self.factor, self.mscale_all_dim)

    @property
    def inv_freq(self) -> Tensor:
        """Frequencies f[i] in radians per position, fp64 `[dim/2]`."""
        extrapolated = super().inv_freq
        low, high = yarn_correction_range(
            self.beta_fast, self.beta_slow, self.dim, self.base, self.original_max_position_embeddings, self.truncate
        )
        if low == high:
            high += 0.001  # keeps the ramp finite: it becomes a step
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
        return extrapolated / self.factor * ramp + extrapolated * (1 - ramp)


def yarn_get_mscale(factor: float, mscale: float) -> float:
    """g(factor, mscale) = 0.1*mscale*ln(factor) + 1, and 1 where factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_correction_range(
    beta_fast: float,
    beta_slow: float,
    dim: int,
    base: float,
    original_max_position_embeddings: int,
    truncate: bool = True,
) -> tuple[float, float]:
    """Channels between which YaRN ramps from extrapolation to interpolation.

    dim(r) = dim*ln(original/(2*pi*r)) / (2*ln(base)), low = dim(beta_fast), high = dim(beta_slow), rounded outwards
    if `truncate`, and kept within [0, dim-1].
    """

    def channel(rotations: float) -> float:
        return dim * math.log(original_max_position_embeddings / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = channel(beta_fast), channel(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def build_rotary(config: MLAConfig) -> RotaryEmbedding:
    """The rotary embedding that a config asks for."""
    if config.rope_type == "rope":
        return RotaryEmbedding(config.qk_pos_emb_head_dim, config.rotary_base)
    return YarnRotaryEmbedding(
        config.qk_pos_emb_head_dim,
        config.rotary_base,
        config.rotary_scaling_factor,
        config.original_max_position_embeddings,
        config.beta_fast,
        config.beta_slow,
        config.mscale,
        config.mscale_all_dim,
        config.rope_truncate,
        config.rope_attention_factor,
    )


def softmax_scale(config: MLAConfig) -> float:
    """Factor on q.k: g(factor, mscale_all_dim)^2 / sqrt(Dn+Dr), g only with YaRN; an explicit scale wins."""
    if config.softmax_scale is not None:
        return float(config.softmax_scale)
    magnitude = 1.0
    if config.rope_type == "yarn":
        magnitude = yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
    return magnitude**2 / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)


_TABLES: dict[tuple, tuple[Tensor, Tensor]] = {}
_MOST_TABLES = 16


def _shared_table(rotary: RotaryEmbedding, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table of at least `length` positions for these parameters on this device, built or grown on demand."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (*rotary.key, device)
    table = _TABLES.get(key)
    if table is not None and table[0].shape[0] >= length:
        return table
    rows = max(_SMALLEST_TABLE, 1 << max(length - 1, 0).bit_length())
    table = _build_table(rotary, rows, device)
    if type(table[0]) is Tensor:  # a fake tensor of somebody's tracing must not outlive the tracing
        if key not in _TABLES and len(_TABLES) >= _MOST_TABLES:
            del _TABLES[next(iter(_TABLES))]
        _TABLES[key] = table
    return table


def _build_table(rotary: RotaryEmbedding, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # Outside inference mode, so that a later training step may save the table for its backward.
    with torch.inference_mode(False), torch.no_grad():
        angle = torch.outer(torch.arange(rows, dtype=torch.float64, device="cpu"), rotary.inv_freq)
        angle = torch.cat([angle, angle], dim=-1)[:, None, None, :]
        cos = (angle.cos() * rotary.amplitude).to(torch.float32)
        sin = (angle.sin() * rotary.amplitude).to(torch.float32)
        return mark_equal_halves(cos.to(device)), mark_equal_halves(sin.to(device))


# What a compiled forward lacks is built while it is traced. This is torch.compiler.assume_constant_result, which would
# import torch._dynamo, two seconds of it, for everybody.
_build_table._dynamo_marked_constant = True  # type: ignore[attr-defined]
