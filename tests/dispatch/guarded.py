"""Attributes and methods that may be used only while a lock is held by the calling thread."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import pytest


class OwnedLock:
    """A lock that knows which thread holds it.

    Attributes:
        entered: How often it was taken.
    """

    def __init__(self) -> None:
        self.entered = 0
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self.entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = None
        self._lock.release()

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()


class _Guarded:
    """An attribute whose uses without the lock `_lock` of its object are noted, if that lock knows its owner."""

    def __init__(self, name: str, noted: list[str]) -> None:
        self._name = name
        self._noted = noted

    def _note(self, owner: Any) -> None:
        lock = owner.__dict__.get("_lock")
        if hasattr(lock, "_is_owned") and not lock._is_owned():
            self._noted.append(f"{type(owner).__name__}.{self._name}")

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        self._note(owner)
        return owner.__dict__[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        if self._name in owner.__dict__:
            self._note(owner)
        owner.__dict__[self._name] = value


def guard(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str) -> list[str]:
    """Return a list to which each use of an attribute of instances of `kind` without their lock is added."""
    noted: list[str] = []
    monkeypatch.setattr(kind, name, _Guarded(name, noted), raising=False)
    return noted


def guard_method(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str, lock: Any) -> list[str]:
    """Return a list to which each call of a method of instances of `kind` without `lock` is added."""
    noted: list[str] = []
    method = getattr(kind, name)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not lock._is_owned():
            noted.append(f"{kind.__name__}.{name}")
        return method(self, *args, **kwargs)

    monkeypatch.setattr(kind, name, called)
    return noted
