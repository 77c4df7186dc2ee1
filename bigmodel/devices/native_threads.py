"""Waits for threads of PyTorch that are not done when the interpreter exits.

Such a thread releases its tensors shortly after the call that it served has returned, and needs the GIL to do so. Up to
Python 3.13, a thread that requests the GIL while the interpreter exits is terminated in the middle of a C++ destructor:
"terminate called without an active exception", exit code 134. It needs the GIL to begin, too, before it gets its name:
one that has not begun never ends, and PyTorch waits ten seconds for it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_ROUNDS = 4
_PAUSE_SECONDS = 0.005
_LONGEST_SECONDS = 10.0


def let_threads_finish(name: str) -> None:
    """Release the GIL until the threads whose names begin with `name` have been idle for `_ROUNDS` checks.

    So are threads that have no name of their own yet. A thread that requests the GIL is woken each time that it is
    released. On a busy machine it may find it taken again, and so sleep at every check: it is idle if it has not run in
    between.

    Returns at once if there are none. Where thread states are unknown (not Linux), waits `_ROUNDS` pauses; never longer
    than `_LONGEST_SECONDS`.
    """
    until = time.monotonic() + _LONGEST_SECONDS
    quiet, before = 0, _states(name)
    while quiet < _ROUNDS and time.monotonic() < until:
        if before is not None and not before:
            return
        time.sleep(_PAUSE_SECONDS)  # releases the GIL
        states = _states(name)
        running = any(state.startswith("R") for state, _switches in (states or {}).values())
        quiet = 0 if running or states != before else quiet + 1
        before = states


def _states(name: str) -> dict[str, tuple[str, int]] | None:
    """Return the state of each of these threads, ``"R"`` for a running or runnable one, and how often it has stopped
    running; None where they are unknown."""
    if not _TASKS.is_dir():
        return None
    found = {task.name: _status(task) for task in _TASKS.iterdir()}
    # A thread has the name of the thread that started it until it is given one. Python's own are none of PyTorch's.
    first = str(os.getpid())
    inherited = found.get(first, {}).get("Name", "")
    # In a forked child, Python's first thread has the number of its parent's.
    own = {first, str(threading.get_native_id()), *(str(each.native_id) for each in threading.enumerate())}
    return {
        number: (status.get("State", "?"), _switches(status))
        for number, status in found.items()
        if status and (status["Name"].startswith(name) or (status["Name"] == inherited and number not in own))
    }


def _status(task: Path) -> dict[str, str]:
    """Return what the kernel says of a thread; nothing if it has ended meanwhile."""
    try:
        text = (task / "status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _switches(status: dict[str, str]) -> int:
    return sum(int(status.get(f"{kind}_ctxt_switches", 0)) for kind in ("voluntary", "nonvoluntary"))
