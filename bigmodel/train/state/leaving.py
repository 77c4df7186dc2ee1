"""Leaving the process group at the end of Python, before the threads of gloo can be caught in it.

A thread of gloo lets go of a collective's tensors a moment after the collective has returned, and needs the
interpreter's lock for that. Up to Python 3.13, a thread that asks for the lock while the interpreter ends is ended
itself, in the middle of a C++ destructor: "terminate called without an active exception", exit code 134. PyTorch does
not wait for these threads as long as anything refers to the group, as a model in DistributedDataParallel does.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
from pathlib import Path

import torch.distributed as dist

_TASKS = Path("/proc/self/task")
_ROUNDS = 4
_PAUSE_SECONDS = 0.005
_LONGEST_SECONDS = 2.0


def leave_at_exit() -> None:
    """When Python ends, leave the process group, if this process is still in one, and let its threads end their work.

    To be called once the group exists: what is registered last is run first.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def finish_at_exit() -> None:
    """Let the threads of a group that somebody else made end their work when Python ends."""
    atexit.unregister(let_threads_finish)
    atexit.register(let_threads_finish)


def _leave() -> None:
    """A process that ends by an error leaves without a word: others may be waiting for it, and it for them."""
    if dist.is_initialized() and getattr(sys, "last_type", None) is None:
        gc.collect()
        dist.destroy_process_group()
    let_threads_finish()


def let_threads_finish() -> None:
    """Leave the interpreter to gloo's threads until none of them has been seen at work for several rounds."""
    until = time.monotonic() + _LONGEST_SECONDS
    quiet = 0
    while quiet < _ROUNDS and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)  # sleeping gives up the interpreter's lock
        quiet = 0 if _gloo_works() else quiet + 1


def _gloo_works() -> bool:
    """Whether a thread of gloo is running or ready to run. Known on Linux only; elsewhere False."""
    return any(_is_running_gloo(task) for task in (_TASKS.iterdir() if _TASKS.is_dir() else ()))


def _is_running_gloo(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return False
    return name.endswith("pt_gloo_runloop") and rest.split()[0] == "R"
