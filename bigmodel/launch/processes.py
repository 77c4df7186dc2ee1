"""The number, devices and rendezvous address of the processes, validated before anything starts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ..errors import LaunchError
from ..limits import RENDEZVOUS_PORT
from .settings import LaunchConfig


@dataclass(frozen=True)
class Processes:
    """The processes of a launch.

    Attributes:
        total: processes over all machines.
        here: processes on this machine.
        cpu: they train on the CPU, over gloo.
        address, port: where they meet; port None means a free one, on a single machine.
        backend: the rendezvous backend of torch.distributed.run.
    """

    total: int
    here: int
    machines: int
    machine_rank: int
    cpu: bool
    address: str
    port: int | None
    backend: str

    @property
    def distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.total > 1


def plan_processes(config: LaunchConfig) -> Processes:
    """Decide from `config` and this machine's GPUs what starts here.

    Raises:
        LaunchError: more processes than GPUs, an uneven split over the machines, a missing or busy address.
    """
    machines = _positive(config.num_machines, "num_machines", 1)
    gpus = _gpus(config)
    cpu = _on_cpu(config, gpus)
    total = _positive(config.num_processes, "num_processes", machines * (1 if cpu else gpus))
    if total % machines:
        raise LaunchError(
            f"num_processes {total} cannot be split evenly over num_machines {machines}; "
            f"it counts all machines together: use {machines * max(1, total // machines)}."
        )
    here = total // machines
    if not cpu and here > gpus:
        raise LaunchError(
            f"num_processes {total} on {machines} machine(s) needs {here} GPUs here, but this machine has {gpus}"
            f"{_of(config)}. Lower num_processes, or train on the CPU with --cpu."
        )
    return Processes(total, here, machines, _machine_rank(config, machines), cpu, *_meeting_point(config, machines))


def check_port(address: str, port: int) -> None:
    """Raises LaunchError when something already listens on `port` of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"main_process_port {port} cannot be used on this machine: {error.strerror}. "
                "End the program that holds it, give another --main_process_port, "
                "or leave it out on a single machine to take a free one."
            ) from None


def _gpus(config: LaunchConfig) -> int:
    """GPUs that the processes of this machine may use."""
    if config.use_cpu or config.distributed_type == "MULTI_CPU":
        return 0
    import torch

    present = torch.cuda.device_count()
    if not present and torch.backends.mps.is_available():
        return 1
    if not config.gpu_ids or config.gpu_ids.lower() == "all":
        return present
    try:
        wanted = [int(number) for number in config.gpu_ids.split(",")]
    except ValueError:
        raise LaunchError(f"gpu_ids is {config.gpu_ids!r}; it must be 'all' or numbers like '0,1'.") from None
    # With CUDA_VISIBLE_DEVICES set, torch counts only what is visible and physical ids cannot be checked.
    missing = [n for n in wanted if n < 0 or n >= present] if "CUDA_VISIBLE_DEVICES" not in os.environ else []
    if missing:
        raise LaunchError(f"gpu_ids names GPU {missing[0]}, but this machine has {present}.")
    return len(wanted)


def _on_cpu(config: LaunchConfig, gpus: int) -> bool:
    if config.use_cpu or config.distributed_type == "MULTI_CPU":
        return True
    # Without a GPU, train on the CPU unless GPUs were requested explicitly.
    return gpus == 0 and config.distributed_type != "MULTI_GPU"


def _of(config: LaunchConfig) -> str:
    return f" (gpu_ids {config.gpu_ids})" if config.gpu_ids and config.gpu_ids.lower() != "all" else ""


def _machine_rank(config: LaunchConfig, machines: int) -> int:
    rank = config.machine_rank or 0
    if not 0 <= rank < machines:
        raise LaunchError(f"machine_rank {rank} is not among 0 to {machines - 1} (num_machines {machines}).")
    if machines > 1 and config.machine_rank is None:
        raise LaunchError(f"num_machines is {machines}: give the rank of this one with --machine_rank.")
    return rank


def _meeting_point(config: LaunchConfig, machines: int) -> tuple[str, int | None, str]:
    port = config.main_process_port or None
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"main_process_port {port} is not a port: 1 to 65535.")
    address = config.main_process_ip
    if machines > 1:
        if not address:
            raise LaunchError(f"num_machines is {machines}: give the address of machine 0 with --main_process_ip.")
        port = port or RENDEZVOUS_PORT
        if (config.machine_rank or 0) == 0:
            check_port(address, port)
        return address, port, config.rdzv_backend or "static"
    if port is None:
        return "localhost", None, "c10d"
    check_port("127.0.0.1", port)
    return address or "127.0.0.1", port, config.rdzv_backend or "static"


def _positive(value: int | None, name: str, default: int) -> int:
    if value is None or (name == "num_processes" and value == -1):
        return max(1, default)
    if value < 1:
        raise LaunchError(f"{name} is {value}; it must be at least 1.")
    return value
