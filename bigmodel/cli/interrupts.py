"""Ctrl-C where nothing is under way that has to be undone: the process ends at once, without a traceback.

What this imports, the interpreter has imported by itself: until it is imported, Ctrl-C shows a traceback.
"""

from __future__ import annotations

import _signal as signal  # without the enums of `signal`, which take 5 ms to import
import os
import sys

TYPE_CHECKING = False  # as of `typing`, which takes longer
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


def end_at_once() -> None:
    """Let Ctrl-C end the process from now on; a process that ignores it goes on doing so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _handle(_end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, where :func:`end_at_once` had changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        _handle(signal.default_int_handler)


class EndingAtOnce:
    """A context in which Ctrl-C ends the process."""

    def __enter__(self) -> None:
        end_at_once()

    def __exit__(self, *raised: object) -> None:
        raise_again()


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread: Ctrl-C is another one's concern
        return


def _end(number: int, frame: FrameType | None) -> None:
    try:
        try:
            sys.stdout.flush()
        finally:
            os.write(2, b"bigmodel: interrupted\n")
    finally:
        os._exit(INTERRUPTED)
