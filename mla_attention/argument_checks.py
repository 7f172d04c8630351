"""Kinds and ranges of arguments, each refused in one line: the argument, what was given, what is allowed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_kind(name: str, value: object, kind: type, *, required: bool = False) -> None:
    """Refuse an argument that is not of its documented kind; None passes unless required.

    Raises:
        ValueError: naming the argument, the kind given and the one allowed.
    """
    if not isinstance(value, kind) and (required or value is not None):
        given = "None" if value is None else type(value).__name__
        article = "an" if kind.__name__[0] in "AEIOUaeiouM" else "a"  # an MLAConfig
        raise ValueError(f"{name}: given {given}, allowed is {article} {kind.__name__}")


def check_int(name: str, value: object, least: int) -> None:
    """Refuse anything but an int (or a traced one) of at least `least`; True and False are none.

    Raises:
        ValueError: naming the argument, the value given and those allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < least:
        raise ValueError(f"{name}: given {value!r}, allowed are integers >= {least}")


def check_number(
    name: str, value: object, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> None:
    """Refuse anything but a finite Python number in (above, inf) and [least, most].

    Raises:
        ValueError: naming the argument, the value given and those allowed.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and above < value and least <= value <= most:  # type: ignore[operator]
        return
    bounds = ((" above {}", above), (" >= {}", least), (" <= {}", most))
    allowed = " and".join(text.format(bound) for text, bound in bounds if math.isfinite(bound))
    raise ValueError(f"{name}: given {value!r}, allowed are finite numbers{allowed}")


def check_dtype(dtype: object) -> None:
    """Refuse a dtype that a layer does not compute in.

    Raises:
        ValueError: naming it and those allowed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: given {dtype!r}, allowed are floating-point dtypes: {', '.join(map(str, DTYPES))}")


def as_device(device: object) -> torch.device:
    """The device that an argument names.

    Raises:
        ValueError: if it names none.
    """
    try:
        return torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        allowed = "allowed are a torch.device and names such as 'cpu', 'cuda:0', 'meta'"
        raise ValueError(f"device: given {device!r}, {allowed}") from error


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; meta, which torch refuses to be asked about, has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast would hand them to a matrix product: in its dtype where it is on, but fp64 as it is."""
    device = tensors[0].device
    if not is_autocast(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
