"""A clock that operations move on, so that measuring can be tested on a machine that is exactly known."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigmodel.profile.machine import timing as stopwatch

Seconds = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]
"""Of an operation, its positional and keyword arguments, and its output."""


class Clock(TorchDispatchMode):
    """Within it, each operation takes the seconds that `seconds` says, by the clock of `stopwatch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Seconds) -> None:
        super().__init__()
        self.seconds = seconds
        self.now = 0.0
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.now += self.seconds(func, args, kwargs or {}, output)
        return output


def copied_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that an operation copies from one tensor into another; 0 if it is no copy."""
    return args[1].nbytes if func is torch.ops.aten.copy_.default else 0
