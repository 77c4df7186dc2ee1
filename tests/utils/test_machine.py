"""What a process is told of its machine: GPUs by ``nvidia-smi``, ranks of an MPI launch, processors near a GPU."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bigmodel.utils import machine

Smi = Callable[[list[str], str], None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Puts a program in the place of ``nvidia-smi`` that writes what NVIDIA's does of these GPUs."""

    def put(names: list[str], driver: str) -> None:
        lines = {"count,name": [f"{len(names)}, {name}" for name in names], "driver_version": [driver] * len(names)}
        cases = "".join(
            f"  --query-gpu={fields}) printf '%s\\n' '{chr(10).join(each)}';;\n" for fields, each in lines.items()
        )
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}  *) exit 2;;\nesac\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


def test_gpus_are_those_that_nvidia_smi_names(smi: Smi) -> None:
    smi(["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"], "550.54")
    assert machine.get_gpu_info() == (["NVIDIA A100-SXM4-80GB"] * 2, 2)
    assert machine.get_driver_version() == "550.54"


def test_without_it_they_are_those_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert machine.get_gpu_info() == (["GPU 0", "GPU 1"], 2)
    assert machine.check_cuda_p2p_ib_support()
    with pytest.raises(FileNotFoundError):
        machine.get_driver_version()


@pytest.mark.parametrize(
    ("name", "count", "driver", "may"),
    [
        ("NVIDIA GeForce RTX 4090", 2, "535.104", False),
        ("NVIDIA GeForce RTX 4090", 2, "550.40.07", True),
        ("NVIDIA GeForce RTX 4090", 1, "535.104", True),
        ("NVIDIA GeForce RTX 3090", 2, "535.104", True),
    ],
)
def test_some_consumer_cards_may_not_copy_to_each_other(
    smi: Smi, name: str, count: int, driver: str, may: bool
) -> None:
    smi([name] * count, driver)
    assert machine.check_cuda_p2p_ib_support() is may


LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_are_those_that_a_launcher_sets(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for names in LAUNCHERS.values() for name in names):
        monkeypatch.delenv(name, raising=False)
    assert machine.get_cpu_distributed_information() == machine.CPUInformation(0, 1, 0, 1)
    for name, value in zip(LAUNCHERS[launcher], ("3", "4", "1", "2"), strict=True):
        monkeypatch.setenv(name, value)
    assert machine.get_cpu_distributed_information() == machine.CPUInformation(3, 4, 1, 2)


@pytest.mark.parametrize("there", [True, False])
def test_several_devices_are_of_cuda_or_of_intel(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: there)
    assert machine.get_current_device_type() == (("xpu", "MULTI_XPU") if there else ("cuda", "MULTI_GPU"))


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")


@pytest.fixture
def processors() -> Iterator[set[int]]:
    """The processors of this process, which are its own again afterwards."""
    before = os.sched_getaffinity(0)
    yield set(before)
    os.sched_setaffinity(0, before)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, processors: set[int]) -> int:
    """Puts a library in the place of NVIDIA's that knows one processor next to GPU 1; returns its number."""
    nearest = max(processors)

    def affinity(handle: str, words: int) -> list[int]:
        assert handle == "GPU 1"
        return [1 << nearest - 64 * word if nearest // 64 == word else 0 for word in range(words)]

    library = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex="GPU {}".format, nvmlDeviceGetCpuAffinity=affinity
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return nearest


@needs_affinity
def test_a_process_runs_next_to_its_gpu(nvml: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        machine.override_numa_affinity(1, verbose=True)
    assert os.sched_getaffinity(0) == {nvml}
    assert f"process 1 runs on processors [{nvml}]" in caplog.text


@needs_affinity
def test_it_is_bound_once(nvml: int, processors: set[int]) -> None:
    machine.set_numa_affinity.cache_clear()
    machine.set_numa_affinity(1)
    os.sched_setaffinity(0, processors)
    machine.set_numa_affinity(1)
    assert os.sched_getaffinity(0) == processors
    machine.set_numa_affinity.cache_clear()


@needs_affinity
def test_without_a_gpu_it_stays(processors: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine.override_numa_affinity(0)
    assert os.sched_getaffinity(0) == processors


@pytest.mark.parametrize(("hip", "package"), [(None, "nvidia-ml-py"), ("6.0", "amdsmi")])
def test_a_missing_package_is_named(hip: str | None, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    for name in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=package):
        machine.override_numa_affinity(0)


def test_lists_of_processors_are_read() -> None:
    assert machine._processors("0-2,5,8-9\n") == {0, 1, 2, 5, 8, 9}
    assert machine._processors("\n") == set()
