"""Ctrl-C where nothing is under way that has to be undone: the process ends at once, without a traceback.

Standard library only, and little of it: this is imported before anything that takes long.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


def end_at_once() -> None:
    """Let Ctrl-C end the process from now on; a process that ignores it goes on doing so."""
    with suppress(ValueError):  # not the main thread: Ctrl-C is another one's concern
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, where :func:`end_at_once` had changed that."""
    with suppress(ValueError):
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """A context in which Ctrl-C ends the process."""
    end_at_once()
    try:
        yield
    finally:
        raise_again()


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, b"bigmodel: interrupted\n")
    os._exit(INTERRUPTED)
