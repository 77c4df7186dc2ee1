"""The header of one GGUF file: parsed and validated without reading a weight.

A GGUF file consists of the 4 bytes ``GGUF``; a version, the count of tensors and of metadata (u32, u64, u64, little
endian); the metadata, a key, a type and a value each; for each tensor its name, dimensions (the fastest first), type
and offset; padding to the alignment; and the tensors' bytes, each aligned. Offsets are relative to the first.
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointFormatError, CheckpointNotFoundError
from ..headers import COPY_AGAIN, refuse
from .types import OTHER_NAMES, TYPES, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 2**28
"""Bytes of the longest header that is read. Those of the largest vocabularies have 20 MB."""

_MAX_ALIGNMENT = 2**20
_MAX_COUNT = 2**63 - 1
_MAX_DIMENSIONS = 4
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_LEAST_ITEM_BYTES = 8 + 1 + 4 + 1
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings in the metadata, such as a vocabulary, of which only the count is kept."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        file: name of its file.
        name: its name there.
        type: how its elements are stored.
        shape: its shape in elements, the fastest dimension last.
        offset: position of its first byte in the file.
        nbytes: its bytes.
    """

    file: str
    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor as it is stored: bytes, unless its elements are single ones."""
        return self.type.dtype or torch.uint8

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor as it is stored, in elements of `dtype`."""
        if self.type.dtype is not None:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // self.type.elements * self.type.nbytes)


@dataclass(frozen=True)
class GgufHeader:
    """The validated header of one file.

    Attributes:
        path: the file.
        metadata: its metadata by key; arrays of strings are `Strings`.
        tensors: its tensors by name.
        file_size: bytes of the whole file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    file_size: int


def read_gguf_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read and validate the header of the GGUF file at `path`; no weight is read.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointFormatError: it is not a valid GGUF file, or a tensor's type is not supported.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(MAGIC) + 20:
                refuse(str(path), f"is {size} bytes long, too short for a GGUF file; {COPY_AGAIN}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Parser(path, content, size).header()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise CheckpointFormatError(f"{path}: is a folder, not a GGUF file") from error


class _Parser:
    """Reads the header of one file from its beginning to its end, and checks each value before it is used."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        self._path, self._source, self._content = path, str(path), content
        self._size, self._limit = size, min(size, MAX_HEADER_BYTES)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._bytes(len(MAGIC)) != MAGIC:
            refuse(self._source, f"does not begin with {MAGIC.decode()}: this is not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            known = " and ".join(map(str, VERSIONS))
            reason = "is a big-endian file" if swapped else f"is of version {version}"
            refuse(self._source, f"{reason}; little-endian files of the versions {known} are supported")
        tensors = self._count("tensors", _LEAST_TENSOR_BYTES)
        items = self._count("metadata", _LEAST_ITEM_BYTES)
        metadata = self._metadata(items)
        alignment = self._alignment(metadata)
        found = [self._tensor_info() for _ in range(tensors)]
        start = -(-self._at // alignment) * alignment
        entries: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in found:
            if name in entries:
                refuse(self._source, f"names the tensor {name!r} twice; {COPY_AGAIN}")
            entries[name] = self._placed(name, kind, shape, offset, start, alignment)
        self._check_overlaps(entries)
        return GgufHeader(self._path, metadata, entries, self._size)

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self._text("the name of a metadata item")
            if key in found:
                refuse(self._source, f"its metadata names {key!r} twice; {COPY_AGAIN}")
            found[key] = self._value(key, self._number("I"))
        return found

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text(f"its metadata {key!r}")
        if kind != _ARRAY:
            refuse(self._source, f"its metadata {key!r} is of the type {kind}, which the format does not know")
        element, count = self._number("I"), self._number("Q")
        if element in _NUMBERS:
            width = struct.calcsize(f"<{_NUMBERS[element]}")
            self._require(count * width, f"its metadata {key!r}, {count} numbers,")
            values = struct.unpack_from(f"<{count}{_NUMBERS[element]}", self._content, self._at)
            self._at += count * width
            return list(values)
        if element != _STRING:
            refuse(self._source, f"its metadata {key!r} is an array of the type {element}, which is not supported")
        self._require(count * 8, f"its metadata {key!r}, {count} strings,")
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):  # a vocabulary has hundreds of thousands
            if self._at + 8 > self._limit:
                self._require(8, f"its metadata {key!r}")
            size = length(self._content, self._at)[0]
            self._at += 8
            if self._at + size > self._limit:
                self._require(size, f"a string of its metadata {key!r}")
            self._at += size
        return Strings(count)

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
            refuse(self._source, f"general.alignment is {value!r:.60}, not a power of two from 8 to {_MAX_ALIGNMENT}")
        return value

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text("the name of a tensor")
        count = self._number("I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            refuse(self._source, f"tensor {name!r:.100} has {count} dimensions; the format allows 1 to 4")
        shape = tuple(reversed([self._number("Q") for _ in range(count)]))
        if 0 in shape or prod(shape) > _MAX_COUNT:
            refuse(self._source, f"tensor {name!r:.100} has the shape {shape}, not of 1 to {_MAX_COUNT} elements")
        return name, self._number("I"), shape, self._number("Q")

    def _placed(
        self, name: str, kind: int, shape: tuple[int, ...], offset: int, start: int, alignment: int
    ) -> GgufTensor:
        """Return a tensor, after checking that it lies within the file."""
        where = f"tensor {name!r:.100}"
        found = TYPES.get(kind)
        if found is None:
            shown = OTHER_NAMES.get(kind, f"number {kind}")
            known = ", ".join(each.name for each in TYPES.values())
            refuse(self._source, f"{where} is stored as {shown}, which is not supported; {known} are")
        if shape[-1] % found.elements:
            refuse(self._source, f"{where} is {found.name} with rows of {shape[-1]}, no multiple of {found.elements}")
        nbytes = prod(shape) // found.elements * found.nbytes
        if offset % alignment:
            refuse(self._source, f"{where} lies at offset {offset}, no multiple of the alignment {alignment}")
        if start + offset + nbytes > self._size:
            refuse(
                self._source,
                f"{where} has {nbytes} bytes at offset {offset}, which end beyond the file of {self._size}: the file "
                f"is truncated or damaged; {COPY_AGAIN}",
            )
        return GgufTensor(self._path.name, name, found, shape, start + offset, nbytes)

    def _check_overlaps(self, tensors: Mapping[str, GgufTensor]) -> None:
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                refuse(self._source, f"tensors {previous!r} and {tensor.name!r} overlap in the file; {COPY_AGAIN}")
            end, previous = tensor.offset + tensor.nbytes, tensor.name

    def _count(self, what: str, least: int) -> int:
        count = int(self._number("Q"))
        if count * least > self._limit - self._at:
            refuse(self._source, f"says that it has {count} {what}, more than its {self._size} bytes can name")
        return count

    def _text(self, what: str) -> str:
        raw = self._bytes(self._number("Q"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            refuse(self._source, f"{what} is not UTF-8 text ({error.reason}); {COPY_AGAIN}")

    def _number(self, kind: str) -> Any:
        width = struct.calcsize(f"<{kind}")
        return struct.unpack(f"<{kind}", self._bytes(width))[0]

    def _bytes(self, count: int, what: str = "its header") -> bytes:
        self._skip(count, what)
        return self._content[self._at - count : self._at]

    def _skip(self, count: int, what: str) -> None:
        self._require(count, what)
        self._at += count

    def _require(self, count: int, what: str) -> None:
        if count > self._limit - self._at:
            refuse(
                self._source,
                f"{what} ends {count} bytes after byte {self._at}, beyond the file of {self._size} bytes or the "
                f"longest header that is read, {MAX_HEADER_BYTES}: the file is truncated or damaged; {COPY_AGAIN}",
            )
