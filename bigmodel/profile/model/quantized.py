"""Bytes of weights that are quantised for the link.

A weight is divided into groups of `GROUP` consecutive elements. In ``int8`` a group has its integers and one scale; in
``int4`` its integers, two per byte, one scale and one zero point. The layout is: the scales of all groups, the zero
points, the integers, each part aligned to `ALIGNMENT`. Integers that have arrived can be restored while the rest is in
transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ...errors import PlanError
from ...limits import ALIGNMENT
from .tensors import DtypeLike, TensorSpec, dtype_bits, normalize_dtype
from .units import UnitProfile

GROUP = 128
"""Elements that share a scale, as in torchao's int4. In int8 the scales add 3 %."""

UNPACK_GROUPS = 128 * 2**10
"""Groups that are restored at once: enough to keep a GPU busy, with 8 MiB of scratch memory."""

OFFLOAD_DTYPES = ("int8", "int4")

PartOfWeight = tuple[torch.dtype, tuple[int, int]]
"""Dtype and shape (groups, elements per group) of one part of a quantised weight."""

_WHOLE = (torch.float32, torch.float16, torch.bfloat16)


def refuse_twice(offload_dtype: str, stored_as: str) -> None:
    """Refuse to quantise for the link what is stored quantised.

    Raises:
        PlanError: the weights are `stored_as` a quantised format.
    """
    if stored_as:
        raise PlanError(
            f"offload_dtype={offload_dtype!r}: the weights are stored quantised already, as {stored_as}, and cross the "
            "link so; leave it out"
        )


def quantized_parts(shape: Sequence[int], dtype: DtypeLike, offload_dtype: str) -> list[PartOfWeight] | None:
    """Return the parts of a quantised weight: scales, zero points (``int4``), and integers.

    None for a tensor that is not quantised: one that is not a matrix (biases, norms, fused experts) or not of floating
    point; one whose number of elements is no multiple of `GROUP`; one that would not become smaller.
    """
    count, found = prod(shape), normalize_dtype(dtype)
    if len(shape) != 2 or found not in _WHOLE or count == 0 or count % GROUP:
        return None
    groups = count // GROUP
    parts: list[PartOfWeight] = [(torch.float32, (groups, 1)), (torch.int8, (groups, GROUP))]
    if offload_dtype == "int4":
        parts = [(torch.float32, (groups, 1)), (torch.int8, (groups, 1)), (torch.uint8, (groups, GROUP // 2))]
    return parts if _nbytes(parts) < count * dtype_bits(found) // 8 else None


def quantized_bytes(shape: Sequence[int], dtype: DtypeLike, offload_dtype: str | None) -> int:
    """Return the bytes of a tensor offloaded as `offload_dtype`; its own bytes if it is not quantised."""
    parts = None if offload_dtype is None else quantized_parts(shape, dtype, offload_dtype)
    return prod(shape) * dtype_bits(dtype) // 8 if parts is None else _nbytes(parts)


def scratch_bytes(groups: int, offload_dtype: str) -> int:
    """Return the bytes of scratch memory for restoring a weight of `groups` groups."""
    return min(groups, UNPACK_GROUPS) * GROUP // 2 if offload_dtype == "int4" else 0


def offloaded_bytes(unit: UnitProfile, offload_dtype: str, experts: bool = True) -> int:
    """Return the bytes of a streamed unit's parameters on its storage device, quantised, with or without experts that
    are fetched one by one."""
    return sum(quantized_bytes(spec.shape, spec.dtype, offload_dtype) for spec in _parameters(unit, experts))


def restored_bytes(unit: UnitProfile, offload_dtype: str) -> tuple[int, int]:
    """Return the bytes of the buffer that receives a quantised unit, and of the scratch memory for restoring it.

    Both are 0 if none of its weights is quantised. Experts that are fetched one by one are not quantised.
    """
    specs = _parameters(unit, experts=False)
    found = [quantized_parts(spec.shape, spec.dtype, offload_dtype) for spec in specs]
    if not any(found):
        return 0, 0
    arriving = sum(_aligned(quantized_bytes(spec.shape, spec.dtype, offload_dtype)) for spec in specs)
    return arriving, max(scratch_bytes(parts[0][1][0], offload_dtype) for parts in found if parts)


def _parameters(unit: UnitProfile, experts: bool = True) -> list[TensorSpec]:
    """Return the parameters of a unit, each storage once, with or without experts that are fetched one by one."""
    apart = frozenset[int]() if experts else unit.expert_storages
    return [spec for number, spec in unit.storages.items() if not spec.is_buffer and number not in apart]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _nbytes(parts: Sequence[PartOfWeight]) -> int:
    return sum(_aligned(dtype.itemsize * prod(shape)) for dtype, shape in parts)
