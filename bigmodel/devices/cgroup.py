"""What a container's limit on memory leaves free (Linux control groups, version 2)."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path("/sys/fs/cgroup")
"""The control group of this process, as a container sees it."""

_GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")
"""What is counted as used, and what the kernel takes back when memory is wanted: cached files, above all."""


def free_bytes(folder: Path = FOLDER) -> int | None:
    """Return the bytes that processes of the control group in `folder` may still take; None without a limit."""
    limit, current, stat = folder / "memory.max", folder / "memory.current", folder / "memory.stat"
    if not limit.exists() or not current.exists():
        return None
    text = limit.read_text().strip()
    if text == "max":
        return None
    counters = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    used = int(current.read_text()) - sum(int(counters.get(name, 0)) for name in _GIVEN_BACK)
    return max(0, int(text) - max(0, used))
