"""The tensors of a module: name, dtype, bytes, and which names share one storage (ties).

Nothing here reads a value, so everything works on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...arguments import check_model
from ...devices.nested import storage_of
from ...devices.virtual import VirtualTensor
from .dtypes import CustomDtype, DtypeLike, dtype_bits, dtype_name, normalize_dtype, normalize_dtypes, planned_dtype


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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_buffer: bool
    persistent: bool
    storage: int


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
    get different keys; an empty tensor shares memory with nobody.
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
    numbers: dict[tuple[int, ...], int] = {}
    specs = []
    for name, tensor, is_buffer, persistent in named_tensors(module):
        if name in special:
            loaded: torch.dtype | CustomDtype = special[name]
        elif as_loaded:
            loaded = tensor.dtype if is_buffer else planned_dtype(tensor.dtype, wanted)
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
