"""Large blocks of virtual accelerators are mapped in huge pages, where the system has any."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from bigmodel.devices.virtual.arena import Arena
from bigmodel.devices.virtual.huge_pages import LEAST_BYTES, PAGE_BYTES

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that an address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not (hasattr(mmap, "MADV_HUGEPAGE") and THP.exists()), reason="this system has no transparent huge pages"
)
def test_large_blocks_are_in_huge_pages_and_small_ones_are_not() -> None:
    arena = Arena(0)
    large = torch.empty(LEAST_BYTES + PAGE_BYTES, dtype=torch.uint8)
    small = torch.empty(PAGE_BYTES, dtype=torch.uint8)
    middle = large.data_ptr() + large.nbytes // 2
    assert "hg" not in flags(middle)
    held = [arena.claim(large), arena.claim(small)]
    assert "hg" in flags(middle)
    assert "hg" not in flags(small.data_ptr() + small.nbytes // 2)
    assert arena.allocated == large.nbytes + small.nbytes
    assert all(held)
