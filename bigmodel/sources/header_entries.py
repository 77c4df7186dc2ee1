"""One tensor's entry in the header of a safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch

from ..errors import CheckpointFormatError

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
"""Format name of each dtype -> torch's. "F4" is apart: two elements share a byte, see `_packed_shape`."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in its file.

    Attributes:
        name: the tensor's key.
        dtype: its dtype as torch has it.
        shape: its shape as torch has it (for 4-bit floats: of bytes holding two elements each).
        offset: first byte, counted from the beginning of the file.
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
    """Check one tensor's entry by itself: its fields, and that its bytes are as many as its shape says.

    Args:
        name: the tensor's key.
        value: what the header's JSON has for it.
        data_start: offset in bytes of the first tensor's bytes in the file.
        data_size: bytes of all tensors together.
        source: the file's name, for messages.

    Raises:
        CheckpointFormatError: names the file, the tensor and the value.
    """
    where = f"tensor {name!r}"
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        refuse(source, f"{where} is {value!r:.100}, where the format wants dtype, shape and data_offsets")
    dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None and dtype_name != "F4":
        known = ", ".join([*DTYPES, "F4"])
        refuse(source, f"{where} has the dtype {dtype_name!r:.100}, which is not one of {known}")
    if not _are_counts(shape):
        refuse(source, f"{where} has the shape {shape!r:.100}, where the format wants whole numbers from 0")
    if prod(size for size in shape if size) > _MAX_COUNT:
        refuse(source, f"{where} has the shape {shape!r:.100}, more elements than can be addressed")
    if not _are_counts(offsets) or len(offsets) != 2:
        refuse(source, f"{where} has the data_offsets {offsets!r:.100}, where the format wants [begin, end]")
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
    """The shape in bytes of a tensor of 4-bit floats, two of which share a byte along the last dimension."""
    if not shape or shape[-1] % 2:
        refuse(source, f"{where} is F4 of shape {shape}: its last dimension must be even, two share a byte")
    return [*shape[:-1], shape[-1] // 2]
