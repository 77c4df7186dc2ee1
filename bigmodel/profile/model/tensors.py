"""The tensors of a module: name, dtype, bytes, and which names share one storage (ties).

Nothing here reads a value, so everything works on the meta device. From top to bottom: dtypes, also those torch has
none for; dotted names; the tensors of a module; ties.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import nn

from ...arguments import check_model, check_names, shown
from ...devices.nested import storage_of
from ...devices.virtual import VirtualTensor
from ...errors import PlanError
from ...quantized.stored import stored_names


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


def with_ancestors(name: str) -> Iterator[str]:
    """Yield `name` and the names of its ancestors, innermost first; the whole model, `""`, is last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def owner_of(name: str, keys: Container[str]) -> str | None:
    """Return the longest of `keys` that is `name` or one of its ancestors; None if there is none."""
    return next((ancestor for ancestor in with_ancestors(name) if ancestor in keys), None)


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer under one of its names.

    Attributes:
        name: full name, as in `state_dict()`.
        shape: its shape.
        dtype: name of its dtype after loading.
        nbytes: its bytes after loading.
        is_buffer: it is a buffer, not a parameter.
        persistent: it is in the state dict (parameters always are).
        storage: specs with the same number share one storage (tied).
        packed: its bytes where the host computes with it by a kernel for packed weights: what is kept in memory then
            instead of it. None: it is not packed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_buffer: bool
    persistent: bool
    storage: int
    packed: int | None = None


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
    """Yield `(name, tensor, is_buffer, persistent)` for every name, a tied tensor once per name.

    The order is that of the modules (depth first), parameters before buffers within one module.

    Raises:
        PlanError: `module` is not a module.
    """
    check_model(module)
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                yield dot + name, parameter, False, True
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                yield dot + name, buffer, True, name not in submodule._non_persistent_buffers_set


def storage_key(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a key that two tensors share exactly if they are the same memory.

    Works on meta tensors too. Tensors that view different parts of one storage (a memory-mapped file, say)
    get different keys; an empty tensor shares memory with no other.
    """
    if isinstance(tensor, VirtualTensor):
        return storage_key(tensor.held)
    storage = storage_of(tensor)
    if tensor.numel() == 0 or not storage:
        return (id(tensor),)
    return (storage, int(tensor.storage_offset()), tensor.numel(), tensor.element_size())


def tensor_specs(
    module: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    as_loaded: bool = True,
) -> list[TensorSpec]:
    """Describe every named tensor of `module`, a tied tensor once per name.

    Args:
        module: any module, on any device, also meta.
        dtype: dtype that floating point tensors are cast to when loaded; None: they keep theirs.
        special_dtypes: dtype by full name; takes precedence over `dtype`.
        as_loaded: True counts as loading does: parameters are cast to `dtype`, buffers keep theirs. False counts as
            accelerate does: buffers are cast too, and no tensor becomes wider.
    """
    wanted = None if dtype is None else normalize_dtype(dtype)
    special = normalize_dtypes(special_dtypes)
    kept = frozenset() if wanted is None else stored_names(module)  # those that are not cast
    numbers: dict[tuple[int, ...], int] = {}
    specs = []
    for name, tensor, is_buffer, persistent in named_tensors(module):
        if name in special:
            loaded: torch.dtype | CustomDtype = special[name]
        elif as_loaded:
            loaded = tensor.dtype if is_buffer or name in kept else planned_dtype(tensor.dtype, wanted)
        else:
            loaded = planned_dtype(tensor.dtype, wanted)
            if dtype_bits(loaded) > dtype_bits(tensor.dtype):
                loaded = tensor.dtype
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(loaded),
                nbytes=(tensor.numel() * dtype_bits(loaded) + 7) // 8,
                is_buffer=is_buffer,
                persistent=persistent,
                storage=numbers.setdefault(storage_key(tensor), len(numbers)),
            )
        )
    return specs


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Return the groups of parameter names that share memory, each sorted, the groups sorted too.

    One pass over the names, so linear in their number; works on the meta device. Two parameters are tied
    when they are the same object or view exactly the same part of one storage.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensor, is_buffer, _persistent in named_tensors(model):
        if not is_buffer:
            groups.setdefault(storage_key(tensor), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Make every name of each group one parameter again: the first that is not on meta, else the first.

    Args:
        model: changed in place.
        tied_params: groups of names as `find_tied_parameters` returns them.
    """
    for names in tied_params:
        found = [_owner(model, name) for name in names]
        candidates = [owner._parameters[leaf] for owner, leaf in found]
        real = [p for p in candidates if p is not None and not p.is_meta]
        keep = real[0] if real else next((p for p in candidates if p is not None), None)
        if keep is None:
            continue
        for owner, leaf in found:
            owner._parameters[leaf] = keep


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return (model.get_submodule(path) if path else model), leaf
