"""Finds the modules that code casts in its forwards: ``self.float()``, ``self.linear.to(torch.float16)``.

A streamed weight that a forward casts cannot be trained: what is cast is a copy on the device, and the weight on the
host keeps its dtype. Nor can a module cast a streamed one that is not on the device yet. Code tells both beforehand.
What is found are methods called on attributes of ``self``, with a dtype that is named; anything else is refused when it
happens.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from .data_use import codes_of_functions

_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
"""The methods of modules that cast, with what they cast to."""

_BESIDE = frozenset(("PUSH_NULL", "PRECALL", "CACHE", "RESUME"))
"""Instructions that stand between those that name something."""


class CastPart(NamedTuple):
    """A module that is cast in a forward.

    Attributes:
        by: The name of the module whose code casts it.
        name: Its name.
        module: The module.
        dtype: What it is cast to.
    """

    by: str
    name: str
    module: nn.Module
    dtype: torch.dtype

    def changes(self, tensor: torch.Tensor) -> bool:
        """Whether the cast changes a tensor of the module."""
        return tensor.is_floating_point() and tensor.dtype != self.dtype


def cast_parts(model: nn.Module) -> Iterator[CastPart]:
    """Yield the modules that code of `model` casts in a forward."""
    paths_of: dict[type, list[tuple[tuple[str, ...], torch.dtype]]] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in paths_of:
            paths_of[kind] = [found for code in _codes_of_forward(kind) for found in _casts(code)]
        for path, dtype in paths_of[kind]:
            part = _part(module, path)
            if part is not None:
                yield CastPart(name, ".".join(filter(None, (name, *path))), part, dtype)


def _codes_of_forward(kind: type) -> list[CodeType]:
    """Return the code of a class's forward, and of the methods of the class that this mentions."""
    found: list[CodeType] = []
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            codes = codes_of_functions(_attribute(kind, name))
            found += codes
            waiting += [other for code in codes for other in code.co_names]
    return found


def _attribute(kind: type, name: str) -> Any:
    """Return what a class or one of its bases defines as `name`; None if none does. No descriptor is called."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _casts(code: CodeType) -> Iterator[tuple[tuple[str, ...], torch.dtype]]:
    """Yield the attributes of ``self`` of which code names a method that casts, with the dtype."""
    if {*_DTYPES, "to"}.isdisjoint(code.co_names):
        return
    path: tuple[str, ...] | None = None
    steps = [step for step in dis.get_instructions(code) if step.opname not in _BESIDE]
    for index, step in enumerate(steps):
        if (
            step.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
            and code.co_argcount
            and step.argval == code.co_varnames[0]
        ):
            path = ()
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and path is not None:
            if step.argval in _DTYPES:
                yield path, _DTYPES[step.argval]
            named = _dtype_named(steps[index + 1 : index + 3]) if step.argval == "to" else None
            if named is not None:
                yield path, named
            path = (*path, step.argval)
        else:
            path = None


def _dtype_named(steps: Sequence[dis.Instruction]) -> torch.dtype | None:
    """Return the dtype that code names as ``torch.float16``; None if it does not."""
    if len(steps) < 2 or steps[0].argval != "torch" or steps[1].opname != "LOAD_ATTR":
        return None
    named = getattr(torch, str(steps[1].argval), None)
    return named if isinstance(named, torch.dtype) else None


def _part(module: nn.Module, path: tuple[str, ...]) -> nn.Module | None:
    found: object = module
    for name in path:
        found = vars(found).get("_modules", {}).get(name) if isinstance(found, nn.Module) else None
    return found if isinstance(found, nn.Module) else None
