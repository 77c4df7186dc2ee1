"""The host's memory is known, also where the kernel's /proc does not tell it."""

from __future__ import annotations

import psutil
import pytest

from bigmodel.devices.host_memory import available_bytes, physical_bytes
from bigmodel.devices.memory import free_memory_bytes, total_host_bytes


def test_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    total = physical_bytes()
    assert 0 < available_bytes() <= total

    def missing() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", missing)
    assert physical_bytes() == pytest.approx(total, rel=0.01)
    assert 0 < available_bytes() <= total
    assert 0 < free_memory_bytes("cpu") <= total
    assert 0 < total_host_bytes() <= total
