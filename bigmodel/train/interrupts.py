"""Ctrl-C during what must be done whole or not at all."""

from __future__ import annotations

import _signal as signal  # what the module `signal` turns into enums, at ten times the price of the call itself
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """A context in which a Ctrl-C takes effect at the end of the body; a second one does at once.

    Only where Ctrl-C would raise KeyboardInterrupt in the body: in the main thread, unless the program handles the
    signal itself.
    """

    def __enter__(self) -> None:
        self._came = False
        self._deferring = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._deferring:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._deferring:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._came and kind is None:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
