"""The memory of a server's process: what large requests leave behind goes back to the system.

For a process that only serves: the settings are of the whole process.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import cache
from typing import Any

ARENAS = 2
"""Heaps that malloc may divide its blocks among: each keeps free pages of its own."""

_M_ARENA_MAX = -8
"""Parameter of `mallopt` in the GNU C library (malloc.h)."""


def return_freed_memory() -> None:
    """Return the pages of freed blocks to the system. malloc keeps them otherwise, those between blocks in use too."""
    if hasattr(_c_library(), "malloc_trim"):
        _c_library().malloc_trim(0)


def return_beside_the_next_load() -> None:
    """Do so in a thread of its own: after a model was unloaded it takes longest, and the next one can begin to load."""
    threading.Thread(target=return_freed_memory, name="bigmodel-return-memory", daemon=True).start()


def use_few_arenas() -> None:
    """Let threads share heaps. By default malloc makes one for each thread that allocates while another does, up to
    eight for each core, and what is free in one is of no use to the others."""
    if hasattr(_c_library(), "mallopt"):
        _c_library().mallopt(_M_ARENA_MAX, ARENAS)


@cache
def _c_library() -> Any:
    """Return the C library; without these functions where it is not GNU's."""
    return ctypes.CDLL(None) if sys.platform == "linux" else object()
