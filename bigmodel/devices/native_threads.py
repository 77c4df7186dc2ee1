"""Threads of PyTorch that still hold tensors when Python ends.

Such a thread lets go of its tensors a moment after the call that it worked for has returned, and needs the
interpreter's lock for that. Up to Python 3.13, a thread that asks for the lock while the interpreter ends is ended
itself, in the middle of a C++ destructor: "terminate called without an active exception", exit code 134.
"""

from __future__ import annotations

import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_ROUNDS = 4
_PAUSE_SECONDS = 0.005
_LONGEST_SECONDS = 2.0


def let_threads_finish(name: str) -> None:
    """Leave the interpreter to the threads whose names begin with `name` until none has been at work for some rounds.

    Returns at once where there are none; where the system does not tell (not Linux), after some hundredths of a second.
    """
    until = time.monotonic() + _LONGEST_SECONDS
    quiet = 0
    while quiet < _ROUNDS and time.monotonic() < until:
        states = _states(name)
        if states is not None and not states:
            return
        time.sleep(_PAUSE_SECONDS)  # sleeping gives up the interpreter's lock
        quiet = 0 if "R" in (_states(name) or ()) else quiet + 1


def _states(name: str) -> list[str] | None:
    """Return the states of these threads, ``"R"`` for one that runs or is ready to; None where they are not known."""
    if not _TASKS.is_dir():
        return None
    found = []
    for task in _TASKS.iterdir():
        try:
            before, _, rest = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if before.partition("(")[2].startswith(name):
            found.append(rest.split()[0])
    return found
