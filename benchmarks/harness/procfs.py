"""Files that the kernel's /proc lacks on this host, as in some sandboxes: they limit what can be measured."""

from __future__ import annotations

import os
from pathlib import Path

_PROCESS = Path("/proc/self")


def missing_counters() -> list[str]:
    """Return what cannot be measured on this host, with the reason, one sentence each."""
    found = []
    if not _opens(_PROCESS / "clear_refs", os.O_WRONLY):
        found.append("the peak of host memory within a program (no /proc/self/clear_refs)")
    elif not _has_peak():
        found.append("the peak of host memory (no VmHWM in /proc/self/status)")
    if not _opens(_PROCESS / "pagemap", os.O_RDONLY):
        found.append("which pages of a file are in a process's memory (no /proc/self/pagemap)")
    return found


def _has_peak() -> bool:
    status = _PROCESS / "status"
    return status.exists() and "VmHWM:" in status.read_text()


def _opens(path: Path, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True
