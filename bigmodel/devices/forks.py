"""Locks that are released in a forked child.

A fork copies locks in their current state, but only the forking thread: a lock that another thread holds at that moment
would stay locked in the child forever. Data-loader workers are such children.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """Return a lock that is released in every forked child. The state it guards must tolerate interrupted changes."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def new_rlock() -> threading.RLock:
    """Return a reentrant lock with the same property as `new_lock`."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
