"""A stand-in for a tracking library that is not installed: it writes down how it is called."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


class Recorder:
    """Takes any call, on itself or on what it gives back, and keeps (path, arguments, keywords) in `calls`."""

    def __init__(self, path: str = "", calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] | None = None) -> None:
        self._path = path
        self.calls = [] if calls is None else calls

    def __getattr__(self, name: str) -> Recorder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self._path}.{name}".lstrip("."), self.calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Recorder:
        self.calls.append((self._path, args, kwargs))
        return Recorder(f"{self._path}()", self.calls)

    def __setitem__(self, name: str, value: Any) -> None:
        self.calls.append((f"{self._path}[]", (name, value), {}))

    def to(self, path: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments and keywords of every call of `path`, in order."""
        return [(args, kwargs) for called, args, kwargs in self.calls if called == path]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Recorder:
    """Let `import name` give a Recorder for the length of a test."""
    recorder = Recorder()
    module = ModuleType(name)
    module.__getattr__ = recorder.__getattr__  # type: ignore[method-assign]
    module.__spec__ = __import__("importlib.machinery", fromlist=["ModuleSpec"]).ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    return recorder
