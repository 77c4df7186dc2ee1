"""Forked processes (data-loader workers, `Dataset.map`) beside the threads of a process group.

A fork copies the group's objects, but not the threads that serve them. When the garbage collector of the child meets
a group that is garbage already, the group's destructor waits for threads that the child does not have: it hangs.
"""

from __future__ import annotations

import gc
import os
from functools import cache


@cache
def keep_garbage_from_forks() -> None:
    """From now on, let no forked child collect what this process had at the fork. Its own garbage, it still does."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(before=_freeze, after_in_parent=_unfreeze)


_frozen_before = 0


def _freeze() -> None:
    global _frozen_before
    _frozen_before = gc.get_freeze_count()
    gc.freeze()


def _unfreeze() -> None:
    if _frozen_before == 0:  # else the program keeps objects frozen itself, which cannot be told apart
        gc.unfreeze()
