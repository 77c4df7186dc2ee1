"""Caches of functions that a model's forward calls: they must not hand fake tensors to real forwards, or the reverse.

Some models compute positions in a function with a `functools.lru_cache`, by shapes and device. A dry run would leave a
fake tensor there for the next real forward; and a real tensor, computed before, would be missing from the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import nn

_CACHE = type(lru_cache(maxsize=1)(id))


@contextmanager
def without_cached_results(model: nn.Module) -> Iterator[None]:
    """Clear the caches of functions in the files of `model`'s classes, before and after the block."""
    caches = list(caches_of(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def caches_of(model: nn.Module) -> Iterator[Any]:
    """Yield the caching functions in the files of the classes of `model`'s modules, also those that others wrap."""
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    seen: set[int] = set()
    for name in files:
        if name.partition(".")[0] in ("torch", "builtins"):
            continue
        members = list(vars(sys.modules.get(name)).values()) if name in sys.modules else []
        classes = [member for member in members if isinstance(member, type) and member.__module__ == name]
        for member in (*members, *(each for kind in classes for each in vars(kind).values())):
            yield from _caches_in(member, seen)


def _caches_in(function: Any, seen: set[int]) -> Iterator[Any]:
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, _CACHE):
        yield function
    elif isinstance(function, (staticmethod, classmethod)):
        yield from _caches_in(function.__func__, seen)
    elif isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
            if isinstance(content, (_CACHE, FunctionType)):
                yield from _caches_in(content, seen)
