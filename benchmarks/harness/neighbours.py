"""CPU time that other processes used during a measurement."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS = float(os.sysconf("SC_CLK_TCK")) if hasattr(os, "sysconf") else 100.0
_KTHREADD = "2"


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far: of all processes, and of those that belong to the measurement."""

    moment: float
    everything: float
    own: float


def usage() -> Usage:
    """Return the CPU time so far: in total, and that of this process, its children and the kernel's threads."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    if not (_PROC / "stat").exists():
        return Usage(time.perf_counter(), own, own)
    # user, nice, system, ..., steal: idle and iowait are not work, interrupts belong to the kernel.
    fields = [float(text) for text in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    everything = (fields[0] + fields[1] + fields[2] + fields[7]) / _TICKS
    return Usage(time.perf_counter(), everything, own + _kernel_threads_and_children())


def neighbours_share(before: Usage, after: Usage) -> float:
    """Return the fraction of all cores that other processes used between two calls of `usage`."""
    cores = os.cpu_count() or 1
    passed = max(after.moment - before.moment, 1e-9)
    others = (after.everything - before.everything) - (after.own - before.own)
    return max(0.0, others / (passed * cores))


def _kernel_threads_and_children() -> float:
    """Return the CPU time of this process's children and of the kernel's threads.

    Ended children are counted by `os.times`; the kernel's threads read from disk mainly for this process.
    """
    parents: dict[str, str] = {}
    ticks: dict[str, int] = {}
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[entry.name] = fields[1]
        ticks[entry.name] = sum(map(int, fields[11:15]))
    ours = {_KTHREADD}
    new = {str(os.getpid())}
    while new:
        ours |= new
        new = {process for process, parent in parents.items() if parent in ours} - ours
    ours.discard(str(os.getpid()))
    return sum(ticks.get(process, 0) for process in ours) / _TICKS
