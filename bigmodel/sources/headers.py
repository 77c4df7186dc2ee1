"""Safetensors headers: parsed and validated without reading a weight.

A safetensors file consists of 8 bytes, the length N of the header (unsigned, little endian); N bytes of JSON with one
entry per tensor: ``{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}``, plus an optional
``"__metadata__"`` of strings; and the tensors' bytes, without holes. Offsets are relative to the end of the header.
(https://huggingface.co/docs/safetensors/index#format)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import CheckpointFormatError, CheckpointNotFoundError
from .index import DuplicateKeyError, once_each

__all__ = ["DTYPES", "SafetensorsHeader", "TensorEntry", "header_length", "parse_header", "read_header"]

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: a longer header is an attack or not a safetensors file."""

_MAX_COUNT = 2**63 - 1
COPY_AGAIN = "copy or download the file again"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Format name -> torch dtype. "F4" is handled separately: two elements share a byte, see `_packed_shape`."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Dtype, shape and position of one tensor in its file.

    Attributes:
        name: the tensor's key.
        dtype: its torch dtype.
        shape: its torch shape; for 4-bit floats in bytes of two elements each.
        offset: position of its first byte in the file.
        nbytes: its size in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def refuse(source: str, reason: str) -> NoReturn:
    """Raise a `CheckpointFormatError` about the file `source`."""
    raise CheckpointFormatError(f"{source}: {reason}")


def parse_entry(name: str, value: Any, data_start: int, data_size: int, source: str) -> TensorEntry:
    """Validate the entry of one tensor: its fields, and that its byte range matches its shape and dtype.

    Args:
        name: the tensor's key.
        value: its entry in the header's JSON.
        data_start: position of the first tensor in the file, in bytes.
        data_size: bytes of all tensors together.
        source: the file's name, for messages.

    Raises:
        CheckpointFormatError: the entry is invalid; the message names file, tensor and value.
    """
    where = f"tensor {name!r}"
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        refuse(source, f"{where} is {value!r:.100}, but the format requires dtype, shape and data_offsets")
    dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None and dtype_name != "F4":
        known = ", ".join([*DTYPES, "F4"])
        refuse(source, f"{where} has the dtype {dtype_name!r:.100}, which is not one of {known}")
    if not _are_counts(shape):
        refuse(source, f"{where} has the shape {shape!r:.100}, but the format requires non-negative integers")
    if prod(size for size in shape if size) > _MAX_COUNT:
        refuse(source, f"{where} has the shape {shape!r:.100}, more elements than can be addressed")
    if not _are_counts(offsets) or len(offsets) != 2:
        refuse(source, f"{where} has the data_offsets {offsets!r:.100}, but the format requires [begin, end]")
    begin, end = offsets
    if begin > end or end > data_size:
        refuse(
            source,
            f"{where} lies at data_offsets [{begin}, {end}] of {data_size} bytes of data: out of range, "
            f"the file is truncated or damaged; {COPY_AGAIN}",
        )
    if dtype is None:
        dtype, shape = torch.float4_e2m1fn_x2, _packed_shape(shape, where, source)
    nbytes = prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        refuse(
            source,
            f"{where} is said to be {dtype_name} of shape {shape}, {nbytes} bytes, "
            f"but its data_offsets [{begin}, {end}] hold {end - begin}; {COPY_AGAIN}",
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, nbytes)


def _are_counts(value: Any) -> bool:
    # `type`, not `isinstance`: JSON's true and false would pass as 1 and 0.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_COUNT for item in value)


def _packed_shape(shape: list[int], where: str, source: str) -> list[int]:
    """Return the shape in bytes of a tensor of 4-bit floats: two share a byte along the last dimension."""
    if not shape or shape[-1] % 2:
        refuse(source, f"{where} is F4 of shape {shape}: its last dimension must be even, two share a byte")
    return [*shape[:-1], shape[-1] // 2]


class SafetensorsHeader(Mapping[str, TensorEntry]):
    """The validated header of one file: a mapping of tensor name to `TensorEntry`.

    Attributes:
        source: the file's path or address, for messages.
        data_start: offset in bytes of the first tensor's bytes.
        file_size: size of the whole file in bytes.
        metadata: the ``__metadata__`` entry, empty where there is none.
    """

    __slots__ = ("_entries", "data_start", "file_size", "metadata", "source")

    def __init__(
        self,
        entries: dict[str, TensorEntry],
        *,
        data_start: int,
        file_size: int,
        metadata: dict[str, str],
        source: str,
    ) -> None:
        self._entries = entries
        self.data_start = data_start
        self.file_size = file_size
        self.metadata = metadata
        self.source = source

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"SafetensorsHeader({self.source!r}, {len(self)} tensors, {self.file_size} bytes)"


def read_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and validate the header of the safetensors file at `path`; no tensor byte is read.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointFormatError: the file is not a valid safetensors file.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            prefix = file.read(LENGTH_BYTES)
            prefix += file.read(header_length(prefix, file_size, str(path)))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise CheckpointFormatError(f"{path}: is a folder, not a safetensors file") from error
    return parse_header(prefix, file_size, str(path))


def header_length(prefix: bytes, file_size: int, source: str) -> int:
    """Return the length in bytes of the header's JSON, validated against the size of the file.

    Args:
        prefix: the file's first 8 bytes, or more.
        file_size: size of the whole file in bytes.
        source: the file's name, for messages.
    """
    if file_size < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        refuse(source, f"is {file_size} bytes long, too short for a safetensors file; {COPY_AGAIN}")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        refuse(
            source,
            f"says its header is {length} bytes long, more than the format allows ({MAX_HEADER_BYTES}): "
            "this is not a safetensors file, or its beginning is damaged",
        )
    if LENGTH_BYTES + length > file_size:
        refuse(
            source,
            f"says its header is {length} bytes long, but the whole file has {file_size} bytes: "
            f"truncated, or not a safetensors file; {COPY_AGAIN}",
        )
    return length


def parse_header(prefix: bytes, file_size: int, source: str) -> SafetensorsHeader:
    """Parse and validate the header in `prefix`, the beginning of a safetensors file.

    Args:
        prefix: the file's first bytes, at least 8 and the whole header; what follows it is ignored.
        file_size: size of the whole file in bytes.
        source: the file's name, for messages.

    Raises:
        CheckpointFormatError: as `read_header`.
    """
    length = header_length(prefix, file_size, source)
    data_start = LENGTH_BYTES + length
    if len(prefix) < data_start:
        raise ValueError(f"{source}: the header has {data_start} bytes, but only {len(prefix)} were given")
    items = _decode(prefix[LENGTH_BYTES:data_start], source)
    metadata = _metadata(items.pop("__metadata__", None), source)
    data_size = file_size - data_start
    entries = {name: parse_entry(name, value, data_start, data_size, source) for name, value in items.items()}
    _check_layout(entries, data_start, file_size, source)
    return SafetensorsHeader(entries, data_start=data_start, file_size=file_size, metadata=metadata, source=source)


def _decode(raw: bytes, source: str) -> dict[str, Any]:
    """Return the header's JSON as a dictionary; refuse invalid UTF-8, other JSON types, and duplicate keys."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(source, f"its header is not UTF-8 text ({error.reason} at byte {error.start}); {COPY_AGAIN}")
    if not text.startswith("{"):
        refuse(source, f"its header begins with {text[:1]!r}, not with '{{': this is not a safetensors file")
    try:
        items = json.loads(text, object_pairs_hook=once_each)
        "".join(items).encode("utf-8")
    except DuplicateKeyError as error:
        refuse(source, f"its header names the key {error.key!r} twice; write the file again without it")
    except UnicodeEncodeError:
        refuse(source, "a tensor name in its header holds half of a surrogate pair, which is not text")
    except (ValueError, RecursionError) as error:
        refuse(source, f"its header is not JSON ({error}); {COPY_AGAIN}")
    return dict(items)


def _metadata(value: Any, source: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        refuse(source, f"its __metadata__ is {value!r:.100}, but the format requires strings by name")
    return dict(value)


def _check_layout(entries: dict[str, TensorEntry], data_start: int, file_size: int, source: str) -> None:
    """Check that the tensors fill the file up to its end, without overlaps or holes."""
    position, previous = data_start, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < position:
            refuse(source, f"tensors {previous!r} and {entry.name!r} overlap in the file; {COPY_AGAIN}")
        if entry.offset > position:
            refuse(
                source,
                f"{entry.offset - position} bytes before tensor {entry.name!r} belong to no tensor, "
                f"which the format forbids; {COPY_AGAIN}",
            )
        position, previous = entry.offset + entry.nbytes, entry.name
    if position != file_size:
        refuse(
            source,
            f"{file_size - position} bytes after the last tensor, {previous!r}, belong to no tensor, "
            f"which the format forbids; {COPY_AGAIN}",
        )
