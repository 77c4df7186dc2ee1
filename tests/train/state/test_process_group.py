"""Numbers from the launcher, and the device they lead to."""

from __future__ import annotations

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train.state.process_group import (
    ProcessNumbers,
    choose_device,
    launched_numbers,
    make_process_group,
)


@pytest.mark.parametrize(
    ("rank", "size", "local"),
    [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
)
def test_torchrun_and_mpirun_are_understood(monkeypatch: pytest.MonkeyPatch, rank: str, size: str, local: str) -> None:
    for name, value in ((rank, "5"), (size, "8"), (local, "1")):
        monkeypatch.setenv(name, value)
    assert launched_numbers() == ProcessNumbers(5, 8, 1)


def test_without_a_launcher_there_is_one_process() -> None:
    assert launched_numbers() == ProcessNumbers(0, 1, 0)


def test_a_device_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    assert choose_device(cpu=False, local_rank=0) == torch.device("meta")


def test_a_device_that_processes_cannot_share_is_named() -> None:
    with pytest.raises(TrainError, match="several processes cannot train on mps"):
        make_process_group(torch.device("mps"), ProcessNumbers(0, 2, 0))
