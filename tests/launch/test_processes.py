"""How many processes start, on what, and where they meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from bigmodel.errors import LaunchError
from bigmodel.launch import LaunchConfig, load_config
from bigmodel.launch.processes import check_port, plan_processes

CONFIGS = Path(__file__).parent / "configs"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Pretend that the machine has so many GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    pretend(2)
    return pretend


def test_every_gpu_gets_a_process_when_nothing_is_said(gpus) -> None:
    gpus(4)
    found = plan_processes(LaunchConfig())
    assert (found.total, found.here, found.cpu, found.port) == (4, 4, False, None)


def test_without_gpus_there_is_one_process_on_the_cpu(gpus) -> None:
    gpus(0)
    found = plan_processes(LaunchConfig())
    assert (found.total, found.cpu, found.distributed) == (1, True, False)


def test_cpu_ranks_need_no_gpus(gpus) -> None:
    for config in (LaunchConfig(use_cpu=True, num_processes=3), LaunchConfig("MULTI_CPU", num_processes=3)):
        found = plan_processes(config)
        assert (found.here, found.cpu, found.distributed) == (3, True, True)


def test_more_processes_than_gpus_is_one_clear_error(gpus) -> None:
    with pytest.raises(LaunchError, match=r"needs 3 GPUs here, but this machine has 2. .* with --cpu"):
        plan_processes(LaunchConfig(num_processes=3))
    with pytest.raises(LaunchError, match=r"but this machine has 1 \(gpu_ids 1\)"):
        plan_processes(LaunchConfig(num_processes=2, gpu_ids="1"))
    gpus(0)
    with pytest.raises(LaunchError, match="needs 2 GPUs here, but this machine has 0"):
        plan_processes(load_config(CONFIGS / "one_machine_two_processes.yaml"))


def test_gpu_ids_are_checked(gpus) -> None:
    with pytest.raises(LaunchError, match="gpu_ids names GPU 5, but this machine has 2"):
        plan_processes(LaunchConfig(gpu_ids="0,5"))
    with pytest.raises(LaunchError, match="must be 'all' or numbers like '0,1'"):
        plan_processes(LaunchConfig(gpu_ids="first"))


def test_two_machines_share_the_processes(gpus) -> None:
    config = load_config(CONFIGS / "two_machines_four_processes.yaml").replace({"machine_rank": 1})
    found = plan_processes(config)
    assert (found.total, found.here, found.machines, found.machine_rank) == (4, 2, 2, 1)
    assert (found.address, found.port, found.backend) == ("127.0.0.1", 29511, "static")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 3}, "num_processes 3 cannot be split evenly over num_machines 2.*use 2"),
        ({"main_process_ip": None}, "give the address of machine 0 with --main_process_ip"),
        ({"machine_rank": None}, "give the rank of this one with --machine_rank"),
        ({"machine_rank": 2}, "machine_rank 2 is not among 0 to 1"),
        ({"main_process_port": 70000}, "main_process_port 70000 is not a port"),
        ({"num_machines": 0}, "num_machines is 0; it must be at least 1"),
        ({"num_processes": -3}, "num_processes is -3; it must be at least 1"),
    ],
)
def test_several_machines_need_to_know_each_other(gpus, changes: dict, message: str) -> None:
    config = load_config(CONFIGS / "two_machines_four_processes.yaml").replace({"machine_rank": 1, **changes})
    with pytest.raises(LaunchError, match=message):
        plan_processes(config)


def test_a_busy_port_is_one_clear_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"main_process_port {port} cannot be used.*another --main_process_port"):
            plan_processes(LaunchConfig(use_cpu=True, num_processes=2, main_process_port=port))
    check_port("127.0.0.1", port)
