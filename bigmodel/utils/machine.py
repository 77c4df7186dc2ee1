"""Facts about this machine: devices, NVIDIA's driver, ranks of an MPI launch, processors near a GPU.

GPUs are asked through ``nvidia-smi`` where it is there: CUDA is not initialised, and processes may be forked later.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from bigmodel.train import environment

_MOST_PEERS = "RTX 40"
_DRIVER_WITH_PEERS = "550.40.07"


@dataclass
class CPUInformation:
    """The ranks of a process that a launcher of several machines started.

    Attributes:
        rank: Its number among all.
        world_size: How many there are.
        local_rank: Its number on this machine.
        local_world_size: How many there are on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the value of the first of these variables that is an integer of at least 0, else `default`."""
    for key in env_keys:
        number = environment.integer(key, -1)
        if number >= 0:
            return number
    return default


def get_cpu_distributed_information() -> CPUInformation:
    """Return the ranks that torchrun, Intel MPI, Open MPI or MVAPICH has set; those of a single process if none has."""
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1),
        local_rank=get_int_from_env(
            ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"], 0
        ),
        local_world_size=get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"], 1
        ),
    )


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of device, and the value of `DistributedType` for several: of CUDA, or of an Intel GPU if one is
    there."""
    return ("xpu", "MULTI_XPU") if torch.xpu.is_available() else ("cuda", "MULTI_GPU")


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the GPUs, and how many there are."""
    if shutil.which("nvidia-smi") is None:
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_name(index) for index in range(count)], count
    names = [line.split(",")[1].strip() for line in _nvidia_smi("count,name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver.

    Raises:
        FileNotFoundError: ``nvidia-smi`` is not there.
    """
    return _nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Whether GPUs may copy to each other and over InfiniBand: some consumer cards may not with old drivers."""
    if shutil.which("nvidia-smi") is None:
        return True
    names, count = get_gpu_info()
    if count < 2 or not any(_MOST_PEERS in name for name in names):
        return True
    return TorchVersion(get_driver_version()) >= _DRIVER_WITH_PEERS


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Run this process on the processors next to its GPU only; without a GPU, do nothing.

    Args:
        local_process_index: Number of the process on this machine, and of its GPU.
        verbose: Log the processors; None does if ``ACCELERATE_DEBUG_MODE`` is set.

    Raises:
        ImportError: The package that knows them is not installed: nvidia-ml-py, or amdsmi.
    """
    if not torch.cuda.is_available():
        return
    near = _near_rocm(local_process_index) if torch.version.hip else _near_cuda(local_process_index)
    os.sched_setaffinity(0, near)
    if environment.flag("ACCELERATE_DEBUG_MODE", False) if verbose is None else verbose:
        logging.getLogger(__name__).info("process %s runs on processors %s", local_process_index, sorted(near))


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Do what `override_numa_affinity` does, once."""
    override_numa_affinity(local_process_index, verbose)


def _nvidia_smi(fields: str) -> list[str]:
    """Return one line for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()


def _near_cuda(index: int) -> set[int]:
    try:
        import pynvml
    except ImportError:
        raise ImportError("nvidia-ml-py knows the processors next to a GPU: `pip install nvidia-ml-py`") from None
    pynvml.nvmlInit()
    words = (os.cpu_count() or 1) // 64 + 1
    masks = pynvml.nvmlDeviceGetCpuAffinity(pynvml.nvmlDeviceGetHandleByIndex(index), words)
    return {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}


def _near_rocm(index: int) -> set[int]:
    try:
        import amdsmi
    except ImportError:
        raise ImportError("the processors next to a GPU are known to amdsmi, which is part of ROCm") from None
    amdsmi.amdsmi_init()
    try:
        node = amdsmi.amdsmi_topo_get_numa_node_number(amdsmi.amdsmi_get_processor_handles()[index])
    finally:
        amdsmi.amdsmi_shut_down()
    if node is None or node < 0:  # bound to none
        return os.sched_getaffinity(0)
    return _processors(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())


def _processors(text: str) -> set[int]:
    """Read a list of Linux: "0-7,16-23"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
