"""What the processor is: its name, the cores that may be used, its last cache."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor_name() -> str:
    """Return the processor's name as the system says it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_cache_bytes() -> int:
    """Return the bytes of the processor's last cache; what processors commonly have if the system does not say."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    if not sizes:
        return 8 * 2**20
    text = sizes[-1].read_text().strip()
    return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1)
