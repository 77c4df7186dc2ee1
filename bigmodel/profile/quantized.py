"""Weights as small integers: which there are, and how many bytes they then take.

A weight is cut into groups of `GROUP` elements that follow each other in memory. A group of ``int8`` is its integers
and one scale; of ``int4`` its integers, two to a byte, one scale and one zero point. The integers of all groups lie
together, then the scales, then the zero points, each from a multiple of `SLAB_ALIGNMENT` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ..errors import PlanError
from .dtypes import DtypeLike, dtype_bits, normalize_dtype
from .units import SLAB_ALIGNMENT

GROUP = 128
"""Elements that share a scale, as in torchao's int4. The scale makes them 3 % larger than 8 bits each would be."""

OFFLOAD_DTYPES = ("int8", "int4")

PartOfWeight = tuple[torch.dtype, tuple[int, int]]
"""Dtype and shape (groups, elements of each) of one part of a quantised weight."""

_WHOLE = (torch.float32, torch.float16, torch.bfloat16)


def check_offload_dtype(offload_dtype: str | None) -> str | None:
    """Return what was given if it is one of `OFFLOAD_DTYPES` or None.

    Raises:
        PlanError: It is neither.
    """
    if offload_dtype is not None and offload_dtype not in OFFLOAD_DTYPES:
        raise PlanError(
            f"offload_dtype is {offload_dtype!r}; use one of {', '.join(OFFLOAD_DTYPES)}, or None for exact weights"
        )
    return offload_dtype


def quantized_parts(shape: Sequence[int], dtype: DtypeLike, offload_dtype: str) -> list[PartOfWeight] | None:
    """Return the parts that a weight is quantised to: integers, scales and, for ``int4``, zero points.

    None for a tensor that stays as it is: vectors, such as biases and norms; integers; a number of elements that groups
    do not divide; one so small that nothing would be won.
    """
    count, found = prod(shape), normalize_dtype(dtype)
    if len(shape) < 2 or found not in _WHOLE or count == 0 or count % GROUP:
        return None
    groups = count // GROUP
    parts: list[PartOfWeight] = [(torch.int8, (groups, GROUP)), (torch.float32, (groups, 1))]
    if offload_dtype == "int4":
        parts = [(torch.uint8, (groups, GROUP // 2)), (torch.float32, (groups, 1)), (torch.int8, (groups, 1))]
    return parts if _nbytes(parts) < count * dtype_bits(found) // 8 else None


def quantized_bytes(shape: Sequence[int], dtype: DtypeLike, offload_dtype: str | None) -> int:
    """Return the bytes of a tensor that is offloaded as `offload_dtype`: its own where it stays as it is."""
    parts = None if offload_dtype is None else quantized_parts(shape, dtype, offload_dtype)
    return prod(shape) * dtype_bits(dtype) // 8 if parts is None else _nbytes(parts)


def _nbytes(parts: Sequence[PartOfWeight]) -> int:
    return sum(-(-dtype.itemsize * prod(shape) // SLAB_ALIGNMENT) * SLAB_ALIGNMENT for dtype, shape in parts)
