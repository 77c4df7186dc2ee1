"""Progress on a terminal; nothing in a pipe."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class RoundProgress:
    """Shows on stderr what is being measured, if that is a terminal.

    Args:
        total: Number of steps.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> RoundProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def step(self, what: str) -> None:
        """Show that `what` begins."""
        if self._bar is not None:
            from rich.markup import escape

            self._bar.update(self._task, advance=1, description=escape(what))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
