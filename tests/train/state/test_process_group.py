"""Numbers from the launcher, and the device they lead to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train.state.process_group import ProcessNumbers, choose_device, launched_numbers, make_process_group


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


MEET_AFTER_A_FAILURE = """
import os, sys
import torch
from bigmodel.train import Accelerator
accelerator = Accelerator(cpu=True)
mark = sys.argv[1]
if accelerator.process_index == 1 and not os.path.exists(mark):
    open(mark, "w").close()
    os._exit(3)
total = accelerator.reduce(torch.ones(1)).item()
os.write(1, f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}: {total}\\n".encode())
accelerator.end_training()
"""


def test_processes_that_torchrun_starts_anew_meet_each_other_and_not_the_dead(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MEET_AFTER_A_FAILURE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "mark")], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["attempt 1: 2.0"] * 2
