"""Memory and cores that the control groups of this process leave it (Linux cgroups v2 and v1), as in containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
"""The mount point of control groups."""

MEMBERSHIP = Path("/proc/self/cgroup")
"""The file that lists the groups of this process."""

UNLIMITED = 2**62
"""Version 1 reports a number of about this size if there is no limit."""


@dataclass(frozen=True)
class _Version:
    """Names in one version.

    Attributes:
        controller: name of the controller in `MEMBERSHIP`.
        mounted: folder of the groups within `ROOT`.
        limit: file with the limit.
        used: file with the bytes in use.
        reclaimable: counters in ``memory.stat`` of used memory that the kernel reclaims under pressure, mainly cached
            files.
    """

    controller: str
    mounted: str
    limit: str
    used: str
    reclaimable: tuple[str, ...]


_VERSIONS = (
    _Version("", "", "memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    _Version(
        "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def free_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that processes of this process's control groups may still take; None without a limit.

    A group's limit applies to all groups inside it, so the result is the minimum over the group and its ancestors.

    Args:
        root: mount point of the control groups.
        membership: the file that lists the groups of this process. It may name groups of the host that are not mounted
            in a container; the mounted root group is used for them.
    """
    found = (
        _free_in(folder, version)
        for version in _VERSIONS
        for folder in _folders(root / version.mounted, version, membership)
    )
    return min((free for free in found if free is not None), default=None)


def limit_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that processes of this process's control groups may take in all; None without a limit.

    The arguments are those of `free_bytes`.
    """
    found = (
        _limit_of(folder / version.limit)
        for version in _VERSIONS
        for folder in _folders(root / version.mounted, version, membership)
    )
    return min((limit for limit in found if limit is not None), default=None)


def usable_cores() -> int:
    """Return how many cores this process may run on: those of its cpuset, as its affinity leaves them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _folders(mount: Path, version: _Version, membership: Path) -> Iterator[Path]:
    """Yield the folder of this process's group and those of the groups around it, up to the mount."""
    yield mount
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        parts = Path(path.lstrip("/")).parts
        if version.controller in controllers.split(",") and ".." not in parts:
            yield from (mount.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))


def _free_in(folder: Path, version: _Version) -> int | None:
    current, stat = folder / version.used, folder / "memory.stat"
    limit = _limit_of(folder / version.limit)
    if limit is None or not current.exists():
        return None
    counters = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    used = int(current.read_text()) - sum(int(counters.get(name, 0)) for name in version.reclaimable)
    return max(0, limit - max(0, used))


def _limit_of(file: Path) -> int | None:
    """Return the limit in a group's file; None if there is no such file or no limit."""
    if not file.exists():
        return None
    text = file.read_text().strip()
    return None if text == "max" or int(text) >= UNLIMITED else int(text)
