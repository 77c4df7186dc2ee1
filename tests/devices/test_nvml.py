"""Memory of CUDA devices without a context of this process; the library and the devices are made up."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

from bigmodel.devices import memory, nvml
from bigmodel.devices.memory import NOMINAL_CONTEXT

GIB = 2**30


class Library:
    """A management library of two devices, the first with 20 GiB free, the second unknown to it."""

    def __init__(self, used: int = 3 * GIB) -> None:
        self.used = used

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
        return 0 if number == 0 else 6

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.free = 20 * GIB
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> int:
        for at, pid in enumerate((1, os.getpid())):
            processes[at].pid, processes[at].used = pid, self.used
        count._obj.value = 2
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(nvml, "nvml_library", lambda: made)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda index: index)
    return made


def test_free_memory_of_a_device_is_read_without_opening_a_context(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that is left out is what tensors could take: a context is still to come."""

    def opens(*_: object) -> None:
        raise AssertionError("it opens a context")

    monkeypatch.setattr(torch.cuda, "mem_get_info", opens)
    assert nvml.free_without_context(0) == 20 * GIB
    assert memory.free_memory_bytes("cuda:0") == 20 * GIB - NOMINAL_CONTEXT


def test_a_library_that_does_not_know_a_device_says_nothing(library: Library) -> None:
    assert nvml.free_without_context(1) is None
    assert nvml.used_by_this_process(1) is None


def test_what_this_process_takes_is_told_from_others(library: Library) -> None:
    assert nvml.used_by_this_process(0) == 3 * GIB
    library.used = 2**64 - 1
    assert nvml.used_by_this_process(0) is None


def test_a_machine_without_the_library_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nvml.nvml_library.cache_clear()
    assert nvml.free_without_context(0) is None
    nvml.nvml_library.cache_clear()


def test_a_process_that_has_not_used_cuda_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not nvml.has_context(0)
