"""Waits for threads of PyTorch that still hold tensors when the interpreter exits.

Such a thread releases its tensors shortly after the call that it served has returned, and needs the GIL to do so. Up to
Python 3.13, a thread that requests the GIL while the interpreter exits is terminated in the middle of a C++ destructor:
"terminate called without an active exception", exit code 134.
"""

from __future__ import annotations

import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_ROUNDS = 4
_PAUSE_SECONDS = 0.005
_LONGEST_SECONDS = 2.0


def let_threads_finish(name: str) -> None:
    """Release the GIL until the threads whose names begin with `name` have been idle for `_ROUNDS` checks.

    Returns at once if there are none. Where thread states are unknown (not Linux), waits `_ROUNDS` pauses; never longer
    than `_LONGEST_SECONDS`.
    """
    until = time.monotonic() + _LONGEST_SECONDS
    quiet = 0
    while quiet < _ROUNDS and time.monotonic() < until:
        states = _states(name)
        if states is not None and not states:
            return
        time.sleep(_PAUSE_SECONDS)  # releases the GIL
        quiet = 0 if "R" in (_states(name) or ()) else quiet + 1


def _states(name: str) -> list[str] | None:
    """Return the states of these threads, ``"R"`` for a running or runnable one; None where they are unknown."""
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
