"""Writes that no version counter counts: those through a parameter's ``.data``.

A module of which the code says ``.data`` in its forward, or in what that calls, may write in this way. Checksums of its
parameters before and after each forward then tell whether it did; other modules pay nothing.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...profile.model.tensors import storage_of


def uses_data(module: nn.Module) -> bool:
    """Whether the forward of `module` or of a module in it may read or set the attribute ``data`` of a tensor."""
    parts = list(module.modules())
    kinds: set[type] = {type(part) for part in parts}
    return any(_class_says_data(kind) for kind in kinds) or any(
        _says_data(type(part), _own_functions(part)) for part in parts
    )


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return numbers that differ if any of `tensors` was written or moved to other memory since.

    They take eight bytes of device memory while they are computed.
    """
    found = []
    with torch.no_grad():
        for tensor in tensors:
            words = _words(tensor.detach())
            # Sums of parts differ where a write only moves elements.
            parts = (words, words[::3], words[: len(words) // 3])
            found += [storage_of(tensor), *(int(part.sum().item()) for part in parts)]
    return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor as integers."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for kind in (torch.int64, torch.int32, torch.int16):
        if flat.numel() % kind.itemsize == 0:
            return flat.view(kind)
    return flat


def _own_functions(part: nn.Module) -> list[FunctionType]:
    """Return the functions that a module has as attributes of its own or as hooks."""
    attributes = vars(part)
    values = (attributes, attributes["_forward_pre_hooks"], attributes["_forward_hooks"])
    return [value for each in values for value in each.values() if isinstance(value, FunctionType)]


_KNOWN: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
"""What is known of classes. Weak: a parametrized module has a class of its own, which refers to it."""


def _class_says_data(kind: type) -> bool:
    found = _KNOWN.get(kind)
    if found is None:
        found = _KNOWN[kind] = _says_data(kind, list(_functions(kind, "forward", {})))
    return found


def _says_data(kind: type, waiting: list[FunctionType]) -> bool:
    """Whether functions, or what they call of the class `kind` and of their file, say ``.data``."""
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for code in _codes(function.__code__):
            if any(step.argval == "data" and step.opname in ("LOAD_ATTR", "STORE_ATTR") for step in _steps(code)):
                return True
            for name in code.co_names:
                waiting += _functions(kind, name, function.__globals__)
    return False


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    return dis.get_instructions(code) if "data" in code.co_names else iter(())


def _functions(kind: type, name: str, others: dict[str, Any]) -> Iterator[FunctionType]:
    """Yield the functions that `name` may refer to: a method of `kind`, or a function of the file that calls it."""
    for found in (inspect.getattr_static(kind, name, None), others.get(name)):
        for value in _wrapped(found):
            if isinstance(value, FunctionType) and not (value.__module__ or "").startswith("torch."):
                yield value


def _wrapped(value: Any) -> Iterator[Any]:
    """Yield a function, and those that its decorators have wrapped."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    while value is not None:
        yield value
        value = getattr(value, "__wrapped__", None) if isinstance(value, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
