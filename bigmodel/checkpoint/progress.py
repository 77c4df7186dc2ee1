"""Progress of long work in bytes, shown on a terminal and passed to a callback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_watcher: ContextVar[Callable[[int, int], None] | None] = ContextVar("watcher", default=None)


@contextmanager
def watching(report: Callable[[int, int], None]) -> Iterator[None]:
    """Within this context long work of the calling thread calls ``report(bytes done, total bytes)`` as it proceeds."""
    token = _watcher.set(report)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Report progress to the callback of `watching`, and to a terminal.

    Args:
        what: description of the work, such as ``"Loading"``.
        total: total bytes.

    Yields:
        A function to be called with the number of bytes done since the last call.
    """
    with _shown(what, total) as show:
        watcher = _watcher.get()
        if watcher is None:
            yield show
            return
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            show(more)
            watcher(done, total)

        watcher(0, total)
        yield advance


@contextmanager
def _shown(what: str, total: int) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
