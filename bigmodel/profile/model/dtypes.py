"""Dtypes and their sizes, including storage types that torch has no dtype for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache

import torch

from ...arguments import check_names, shown
from ...errors import PlanError


class CustomDtype(Enum):
    """Storage types that a plan may name and that are not (in every torch release) a `torch.dtype`."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


DtypeLike = str | torch.dtype | CustomDtype

_CUSTOM_BITS = {CustomDtype.FP8: 8, CustomDtype.INT4: 4, CustomDtype.INT2: 2}


def normalize_dtype(dtype: DtypeLike) -> torch.dtype | CustomDtype:
    """Return the dtype for `"float16"`, `"torch.float16"`, `"int4"`, a `torch.dtype` or a `CustomDtype`.

    Raises:
        PlanError: the name is not a dtype.
    """
    if isinstance(dtype, (torch.dtype, CustomDtype)):
        return dtype
    if not isinstance(dtype, str):
        raise PlanError(f"{shown(dtype)} is not a dtype; use a name such as 'bfloat16', or a torch.dtype")
    name = dtype.removeprefix("torch.")
    for custom in CustomDtype:
        if name == custom.value:
            return custom
    found = getattr(torch, name, None)
    if found is None or not isinstance(found, torch.dtype):
        raise PlanError(f"{shown(dtype)} is not a dtype; use a name such as 'bfloat16', or a torch.dtype")
    return found


def torch_dtype(dtype: DtypeLike) -> torch.dtype:
    """Return the floating point `torch.dtype` that weights are loaded as.

    Raises:
        PlanError: `dtype` is not one.
    """
    found = normalize_dtype(dtype)
    if isinstance(found, CustomDtype) or not found.is_floating_point:
        raise PlanError(
            f"weights cannot be loaded with the dtype {dtype_name(found)}; give one of floating point, "
            "such as 'bfloat16'"
        )
    return found


def normalize_dtypes(special_dtypes: Mapping[str, DtypeLike] | None) -> dict[str, torch.dtype | CustomDtype]:
    """Return dtypes given by tensor name; an empty dictionary for None.

    Raises:
        PlanError: it is not a mapping of names, or a dtype is unknown.
    """
    if special_dtypes is None:
        return {}
    check_names("special_dtypes", special_dtypes)
    return {name: normalize_dtype(dtype) for name, dtype in special_dtypes.items()}


def dtype_bits(dtype: DtypeLike) -> int:
    """Return the number of bits one element of `dtype` takes in a checkpoint or in memory."""
    return _bits(normalize_dtype(dtype))


@cache
def _bits(dtype: torch.dtype | CustomDtype) -> int:
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BITS[dtype]
    return torch.empty((), dtype=dtype, device="meta").element_size() * 8


def dtype_byte_size(dtype: DtypeLike) -> float:
    """Return the bytes one element of `dtype` takes: 4 for `torch.float32`, 0.5 for `CustomDtype.INT4`."""
    bits = dtype_bits(dtype)
    return bits // 8 if bits % 8 == 0 else bits / 8


def dtype_name(dtype: torch.dtype | CustomDtype) -> str:
    """Return the short name of a dtype: `"bfloat16"`, `"int4"`."""
    return dtype.value if isinstance(dtype, CustomDtype) else str(dtype).removeprefix("torch.")


def planned_dtype(current: torch.dtype, wanted: torch.dtype | CustomDtype | None) -> torch.dtype | CustomDtype:
    """Return the dtype of a tensor after loading as `wanted`: only floating point tensors are cast."""
    if wanted is None or not current.is_floating_point:
        return current
    return wanted
