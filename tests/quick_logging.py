"""Pytest's capture of log messages, without a look at every logger of the process in every phase of every test.

Newer versions of pytest attach their two handlers to each logger that does not propagate, too. PyTorch and others make
sixty of them among a thousand loggers: most of the time of a test that does little. Older versions attach them to the
root alone, and so does this: no test here looks at messages of loggers that do not propagate.
"""

from __future__ import annotations

import logging
from typing import Any

import _pytest.logging
import pytest


class _AtTheRoot(_pytest.logging.catching_logs[Any]):
    """Attaches a handler to the root logger."""

    def __enter__(self) -> Any:
        root = logging.getLogger()
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        return self.handler


def attach_at_the_root(patch: pytest.MonkeyPatch) -> None:
    """Let pytest capture messages at the root logger, if this version attaches its handlers elsewhere, too."""
    if "attached_loggers" in getattr(_pytest.logging.catching_logs, "__slots__", ()):
        patch.setattr(_pytest.logging, "catching_logs", _AtTheRoot)
