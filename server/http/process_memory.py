"""The memory of a server's process: objects that stay for good, and what large requests leave behind.

For a process that only serves: both settings are of the whole process.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def keep_what_is_loaded() -> None:
    """Exempt all objects that exist now from garbage collection, for as long as the process lives.

    A full collection looks at every object of torch, transformers and the model, half a million, and no other thread
    runs meanwhile: 0.4 s in which nobody is answered.
    """
    gc.collect()
    gc.freeze()


def return_freed_memory() -> None:
    """Return the pages of freed blocks to the system. malloc keeps them otherwise, those between blocks in use too."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "malloc_trim"):  # not in every C library
        libc.malloc_trim(0)
