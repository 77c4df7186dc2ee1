"""The host's memory, also where the kernel's /proc is poor, as in some sandboxes."""

from __future__ import annotations

import os

import psutil


def physical_bytes() -> int:
    """Return the bytes of the machine's RAM."""
    try:
        return int(psutil.virtual_memory().total)
    except OSError:  # no /proc/meminfo
        return _pages("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the bytes that new memory could take; without /proc/meminfo only those that hold nothing, not even files
    that are cached."""
    try:
        return int(psutil.virtual_memory().available)
    except OSError:
        return _pages("SC_AVPHYS_PAGES")


def _pages(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
