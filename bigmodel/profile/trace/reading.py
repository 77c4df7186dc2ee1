"""Functions that treat fake tensors otherwise than real ones, made to treat them alike while dry runs last."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .values import Values, real_tensors


@contextmanager
def read_as_real() -> Iterator[None]:
    """Let models read the values of fake tensors as they read those of real ones.

    Models of transformers take fake tensors for those of a compiler by default, and make masks also where nothing is
    masked. PyTorch makes the list of a fake tensor's numbers by an operation for each, which takes seconds for a mask
    of a long prompt: where the numbers are known (`reading`), they are listed at once.
    """
    global _reading
    library: Any = sys.modules.get("transformers.utils.import_utils")
    replaced: list[tuple[Any, str, Any]] = [(FakeTensor, "tolist", _listed)]
    if library is not None and hasattr(library, "is_fake_tensor"):
        replaced.append((library, "is_fake_tensor", _is_not_read))
    with _lock:
        _reading += 1
        for owner, name, other in replaced if _reading == 1 else ():
            _before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, other)
    try:
        yield
    finally:
        with _lock:
            _reading -= 1
            while _before and not _reading:
                setattr(*_before.pop())


@contextmanager
def reading(values: Values) -> Iterator[None]:
    """Let `tolist` of fake tensors read `values` in this thread."""
    before, _read.values = getattr(_read, "values", None), values
    try:
        yield
    finally:
        _read.values = before


_lock = threading.Lock()
_read = threading.local()
_reading = 0
_before: list[tuple[Any, str, Any]] = []
_list_by_operations = FakeTensor.tolist


def _is_not_read(_tensor: Any) -> bool:
    return False


def _listed(tensor: FakeTensor) -> Any:
    values: Values | None = getattr(_read, "values", None)
    known: torch.Tensor | None = None if values is None else values.of(tensor)
    if known is None:
        return _list_by_operations(tensor)
    with real_tensors():
        return known.tolist()
