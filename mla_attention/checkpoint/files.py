"""Reading checkpoint tensors piece by piece: mappings, safetensors files, folders and indexes of shards.

A checkpoint is seen as `{key: LazyTensor}`: shape and dtype are known at once, values are read one box (a tuple of
slices) at a time, so a rank that holds a shard asks the disk for no more than its shard.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from mla_attention.argument_checks import check_kind

Box = tuple[slice, ...]  # one slice with explicit start and stop per dimension

INDEX_NAME = "model.safetensors.index.json"
_ACCEPTED = f"a mapping of tensors, a .safetensors file, a folder of them, or a {INDEX_NAME}"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class LazyTensor(Protocol):
    """A tensor of a checkpoint whose values are read on demand, one box at a time."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box) -> Tensor:
        """Return the values inside `box` as a tensor of this dtype."""


class InMemory:
    """A tensor that is already there; `read` returns a view."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def read(self, box: Box) -> Tensor:
        """Return a view of the box; a DTensor is gathered first, on all its ranks."""
        whole = self.tensor.full_tensor() if isinstance(self.tensor, DTensor) else self.tensor
        return whole[box]


class InFile:
    """A tensor of a safetensors file; `read` touches only the bytes of the box."""

    def __init__(self, key: str, handle: Any) -> None:
        self._slice = handle.get_slice(key)
        self.shape = tuple(self._slice.get_shape())
        name = self._slice.get_dtype()
        if name not in _DTYPES:
            raise ValueError(f"{key} has the unknown safetensors dtype {name}; known are {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[name]

    def read(self, box: Box) -> Tensor:
        """Return the box as a new tensor in host memory."""
        return self._slice[box]


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a full tensor of this shape."""
    return tuple(slice(0, size) for size in shape)


@contextmanager
def open_tensors(
    tensors: Mapping[str, Tensor] | str | os.PathLike[str], prefix: str, ignored: Callable[[str], bool]
) -> Iterator[dict[str, LazyTensor]]:
    """Open a checkpoint and yield its tensors below `prefix`, keys without the prefix.

    Args:
        tensors: Mapping of full tensors, or the path of a safetensors file, of a folder of them (its index is used when
            there is one), or of an index file.
        prefix: Keys that do not start with it belong to other modules and are neither opened nor checked.
        ignored: Keys (without prefix) for which it is true are left out.

    Yields:
        `{key: LazyTensor}`; files stay open inside the `with` block.

    Raises:
        ValueError: nothing below the prefix, a value that is no tensor, a path that is no safetensors checkpoint, a
            missing or broken shard, or one key in two shards.
    """
    check_kind("prefix", prefix, str, required=True)
    if isinstance(tensors, Mapping):
        strange = [repr(key) for key in tensors if not isinstance(key, str)]
        if strange:
            raise ValueError(f"tensors must have keys of type str, got {', '.join(strange[:8])}")
        chosen = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
        chosen = {key: value for key, value in chosen.items() if not ignored(key)}
        wrong = [
            f"{prefix}{key} ({type(value).__name__})" for key, value in chosen.items() if not torch.is_tensor(value)
        ]
        wrong += [
            f"{prefix}{key} ({value.layout})"
            for key, value in chosen.items()
            if torch.is_tensor(value) and value.layout != torch.strided
        ]
        if wrong:
            raise ValueError(f"tensors must map keys to dense torch tensors, got {', '.join(wrong)}")
        on_meta = [prefix + key for key, value in chosen.items() if value.is_meta]
        if on_meta:
            raise ValueError(f"tensors must hold values, on the meta device are {', '.join(on_meta)}")
        _require_any(chosen, prefix, "tensors")
        yield {key: InMemory(value) for key, value in chosen.items()}
        return
    if not isinstance(tensors, (str, os.PathLike)):
        raise ValueError(f"tensors must be {_ACCEPTED}, got {type(tensors).__name__}")

    path = Path(tensors)
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}

        def handle_of(file: Path) -> Any:
            if file not in handles:
                handles[file] = stack.enter_context(_open(file))
            return handles[file]

        found: dict[str, LazyTensor] = {}
        for key, file in _files_by_key(path, handle_of).items():
            short = key[len(prefix) :]
            if key.startswith(prefix) and not ignored(short):
                handle = handle_of(file)
                try:
                    found[short] = InFile(key, handle)
                except SafetensorError as error:
                    raise ValueError(f"the index names {key} in {file}, which does not hold it") from error
        _require_any(found, prefix, str(path))
        yield found


def _files_by_key(path: Path, handle_of: Callable[[Path], Any]) -> dict[str, Path]:
    """Return which file holds each key; an index is trusted for names, files without one are opened for their keys."""
    if path.is_dir():
        if (path / INDEX_NAME).is_file():
            return _read_index(path / INDEX_NAME)
        files = sorted(path.glob("*.safetensors"))
    elif path.is_file() and path.suffix == ".json":
        return _read_index(path)
    elif path.is_file() and path.suffix == ".safetensors":
        files = [path]
    else:
        files = []
    if not files:
        raise ValueError(f"no safetensors checkpoint at {path}; allowed are {_ACCEPTED}")
    holders: dict[str, Path] = {}
    for file in files:
        for key in handle_of(file).keys():  # noqa: SIM118 - a safetensors handle is no mapping
            if key in holders:
                raise ValueError(f"{key} is in both {holders[key]} and {file}")
            holders[key] = file
    return holders


def _read_index(index: Path) -> dict[str, Path]:
    """Return `weight_map` of a sharded checkpoint's index as `{key: file}`."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {key: index.parent / name for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{index} is no safetensors index: it needs {{"weight_map": {{key: file}}}}') from error


def _open(file: Path) -> Any:
    """Open one safetensors file, or say which one is missing or broken."""
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read the safetensors file {file}: {error}") from error


def _require_any(found: Mapping[str, object], prefix: str, where: str) -> None:
    if not found:
        raise ValueError(f"no key of {where} starts with the prefix {prefix!r}")
