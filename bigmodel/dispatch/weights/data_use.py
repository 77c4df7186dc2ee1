"""Writes that no version counter counts: those through a parameter's ``.data``.

A module of which the code says ``.data`` in its forward, or in what that calls, may write in this way. Checksums of its
parameters before and after each forward then tell whether it did; other modules pay nothing.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ...devices.nested import storage_of
from .outside_use import host_value


def uses_data(module: nn.Module) -> bool:
    """Whether the forward of `module` or of a module in it may read or set the attribute ``data`` of a tensor.

    What these call is followed by name: to methods of any module in it, of objects that these hold, and to functions of
    their files and of files that they import.
    """
    parts = list(module.modules())
    kinds: set[type] = {type(part) for part in parts}
    kinds |= {type(value) for part in parts for value in vars(part).values() if _is_followed(type(value))}
    if _may_say_data(frozenset(map(ref, kinds))):
        return True
    own = [function for part in parts for function in _own_functions(part)]
    if not own:
        return False
    says, names = _facts(own)
    return says or _reach_data(list(kinds), names)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return numbers that differ if any of `tensors` was written or moved to other memory since.

    They take eight bytes of device memory while they are computed.
    """
    found = []
    with torch.no_grad():
        for tensor in tensors:
            words = _words(host_value(tensor))
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


_Facts = tuple[bool, frozenset[str]]
"""Whether functions, or functions that they call, say ``.data``; and the names of methods that they may call."""

_METHODS: WeakKeyDictionary[type, dict[str, _Facts | None]] = WeakKeyDictionary()
"""The methods of classes, without PyTorch's and Python's, and what is known of them. Weak: a parametrized module has a
class of its own, which refers to it."""


@lru_cache(maxsize=1024)
def _may_say_data(kinds: frozenset[ref[type]]) -> bool:
    """Whether ``forward`` of any of these classes may say ``.data``."""
    alive = [kind for each in kinds if (kind := each()) is not None]
    return _reach_data(alive, frozenset(("forward",)))


def _reach_data(kinds: Sequence[type], names: frozenset[str]) -> bool:
    """Whether methods of `kinds` with these names say ``.data``, or methods with names that they mention."""
    methods = [(kind, _methods(kind)) for kind in kinds]
    seen: set[str] = set()
    waiting = set(names)
    while waiting:
        seen |= waiting
        mentioned: set[str] = set()
        for kind, known in methods:
            for name in waiting & known.keys():
                says, others = known[name] or _method_facts(kind, name)
                if says:
                    return True
                mentioned |= others
        waiting = mentioned - seen
    return False


def _methods(kind: type) -> dict[str, _Facts | None]:
    if kind not in _METHODS:
        followed = [base for base in kind.__mro__ if _is_followed(base)]
        _METHODS[kind] = {name: None for base in followed for name in vars(base)}
    return _METHODS[kind]


def _method_facts(kind: type, name: str) -> _Facts:
    facts = _METHODS[kind][name] = _facts(list(_functions(inspect.getattr_static(kind, name, None))))
    return facts


def _facts(waiting: list[FunctionType]) -> _Facts:
    seen: set[CodeType] = set()
    names: set[str] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for code in _codes(function.__code__):
            if any(step.argval == "data" and step.opname in ("LOAD_ATTR", "STORE_ATTR") for step in _steps(code)):
                return True, frozenset()
            names.update(code.co_names)
            waiting += _called(code, function.__globals__)
    return False, frozenset(names)


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    return dis.get_instructions(code) if "data" in code.co_names else iter(())


def _called(code: CodeType, scope: Mapping[str, Any]) -> Iterator[FunctionType]:
    """Yield the functions that a function's code may refer to: of its file, of modules and of classes named in it."""
    for name in code.co_names:
        # A module may also be imported within a function.
        found = scope.get(name, sys.modules.get(name, sys.modules.get(f"{scope.get('__package__')}.{name}")))
        if isinstance(found, (ModuleType, type)):
            inside = vars(found) if _is_followed(found) else {}
            for other in code.co_names:
                yield from _functions(inside.get(other))
        else:
            yield from _functions(found)


def _is_followed(scope: type | ModuleType) -> bool:
    """Whether a class or module is none of PyTorch, NumPy and Python."""
    name = scope.__name__ if isinstance(scope, ModuleType) else scope.__module__
    root = name.partition(".")[0]
    return root not in ("torch", "numpy") and root not in sys.stdlib_module_names


def codes_of_functions(found: Any) -> list[CodeType]:
    """Return the code of the Python functions behind an attribute, without those of PyTorch, and of functions in it."""
    return [code for function in _functions(found) for code in _codes(function.__code__)]


def _functions(found: Any) -> Iterator[FunctionType]:
    """Yield the Python functions behind an attribute, without those of PyTorch."""
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
