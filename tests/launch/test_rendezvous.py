"""Scripts that join the process group themselves, without an Accelerator, survive restarts as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ports import free_port

from .starting import launched, start_launch

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1 and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os._exit(3)
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}: {total.item()}\\n".encode())
dist.destroy_process_group()
"""
AGAIN = "attempt 1: 2.0"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_restarted_processes_of_one_machine_meet_in_a_new_store(script: Path) -> None:
    flags = ["--cpu", "--num_processes", 2, "--max_restarts", 1]
    done = launched(*flags, script, script.with_name("mark"), fork_ranks=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [AGAIN] * 2


@pytest.mark.slow
def test_restarted_processes_of_two_machines_meet_in_a_new_store(script: Path) -> None:
    flags = ["--cpu", "--num_machines", 2, "--num_processes", 2, "--max_restarts", 1]
    flags += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    flags += ["--machine_rank"]
    both = [start_launch(*flags, rank, script, script.with_name("mark"), fork_ranks=True) for rank in (1, 0)]
    outputs = [machine.communicate(timeout=100) for machine in both]
    assert [(machine.returncode, out) for machine, (out, _) in zip(both, outputs)] == [(0, AGAIN + "\n")] * 2, outputs
