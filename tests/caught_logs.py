"""Logs are caught of loggers that do not propagate only for tests that ask for logs.

For each part of a test pytest looks at all loggers, of which libraries make a thousand, for those whose records do not
reach the root, and adds its two handlers to each: a hundred of PyTorch's. That is half of what a test takes that does
nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import _pytest.logging
import pytest


class _Asked:
    """Whether the running test has the fixture `caplog`."""

    now = False


class CatchingLogs(_pytest.logging.catching_logs):  # type: ignore[type-arg]
    """As pytest's where a test asks for logs; else of the root logger alone."""

    __slots__ = ()

    def __enter__(self) -> Any:
        if _Asked.now:
            return super().__enter__()
        root = logging.getLogger()
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        return self.handler


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Note whether the test asks for logs."""
    _Asked.now = "caplog" in getattr(item, "fixturenames", ())


def pytest_configure() -> None:
    """Use it, in the place of pytest's, where that looks at all loggers."""
    if "attached_loggers" in getattr(_pytest.logging.catching_logs, "__slots__", ()):
        _pytest.logging.catching_logs = CatchingLogs  # type: ignore[misc]
