"""Launcher numbers, device choice, data-loader workers beside a process group, and exit codes while gloo works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train.state.process_group import (
    ProcessNumbers,
    choose_device,
    group_backend,
    launched_numbers,
    make_process_group,
)
from tests.preloaded import python_executable, run
from tests.train.multiprocess import run_script


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


def test_each_process_has_its_own_device_of_a_forced_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    assert [choose_device(cpu=False, local_rank=rank) for rank in range(2)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:3")
    assert choose_device(cpu=False, local_rank=0) == torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("made", "device", "name"),
    [("cpu:gloo,cuda:nccl", "cuda", "nccl"), ("cpu:gloo,cuda:nccl", "cpu", "gloo"), ("gloo", "cpu", "gloo")],
)
def test_the_backend_is_named_as_of_the_device(
    monkeypatch: pytest.MonkeyPatch, made: str, device: str, name: str
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: made)
    assert group_backend(torch.device(device)) == name


def test_a_device_that_processes_cannot_share_is_named() -> None:
    with pytest.raises(TrainError, match="several processes cannot train on mps"):
        make_process_group(torch.device("mps"), ProcessNumbers(0, 2, 0))


RAISED_AND_KEPT = """
import multiprocessing, sys, threading, time
import torch.distributed as dist
from bigmodel.train.state.process_group import end_after_errors
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
end_after_errors(0.05)
{}
raise ValueError("the script's own error")
"""

KEPT = """
threading.Thread(target=threading.Event().wait, name="uploads").start()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), name="reader")
child.start()
print("its output")
"""


@pytest.mark.slow
def test_a_process_that_raised_and_does_not_end_is_ended() -> None:
    ended = run(
        ["-c", RAISED_AND_KEPT.format(KEPT)], timeout=30
    )  # it returns once the child has closed the output, too
    assert (ended.returncode, ended.stdout) == (1, "its output\n")
    assert "the script's own error" in ended.stderr
    assert "has not ended, kept by uploads, reader: it is ended" in ended.stderr


@pytest.mark.slow
def test_a_process_that_raised_may_finish_what_it_does_at_exit() -> None:
    saves = "import atexit, time; atexit.register(lambda: (time.sleep(0.2), print('saved')))"
    assert run(["-c", RAISED_AND_KEPT.format(saves)], timeout=60).stdout == "saved\n"


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


@pytest.mark.slow
def test_processes_that_torchrun_starts_anew_meet_each_other_and_not_the_dead(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MEET_AFTER_A_FAILURE)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    written = run_script([*command, script, tmp_path / "mark"], PYTHON_EXEC=str(python_executable()))
    assert written.splitlines() == ["attempt 1: 2.0"] * 2


# A group that nobody can reach any more is garbage that only the collector finds, here in the worker.
FORKING = """
import gc
import torch.distributed as dist
from torch.utils.data import DataLoader
from bigmodel.train import Accelerator, PartialState

class Collecting:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return index

gc.disable()
gc.unfreeze()
PartialState(cpu=True).need_process_group()
garbage = [dist.group.WORLD]
garbage.append(garbage)
del garbage
PartialState().destroy_process_group()
loader = DataLoader(Collecting(), batch_size=2, num_workers=1, timeout=20)
print([batch.tolist() for batch in PREPARED])
print(gc.get_freeze_count())
"""


@pytest.mark.slow
@pytest.mark.parametrize("prepared", ["loader", "Accelerator(cpu=True).prepare(loader)"], ids=["bare", "prepared"])
def test_a_worker_does_not_wait_for_threads_that_it_does_not_have(prepared: str) -> None:
    written = run_script(["-c", FORKING.replace("PREPARED", prepared)])
    assert written.splitlines() == ["[[0, 1], [2, 3]]", "0"]


# In each child, a thread of gloo waits for the interpreter's lock, which it needs to let go of tensors, when the
# program's last line is done: the interpreter is not given up to it before. Something still refers to the group.
LEAVING = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
from bigmodel.train import Accelerator, PartialState

def child(end):
    global kept
    signal.alarm(60)  # the process ends by it if it hangs
    state = PartialState(cpu=True)
    state.need_process_group()
    kept = dist.group.WORLD
    accelerator = Accelerator(cpu=True)
    sys.setswitchinterval(1000)
    dist.all_reduce_coalesced([torch.ones(1 << 22), *torch.ones(200, 1)], async_op=True)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        pass
    if end == "end_training":
        accelerator.end_training()
    elif end == "error":
        raise ValueError("meant")
    elif end == "exit 3":
        sys.exit(3)

def codes(ends):
    running = {}
    for end in ends:
        pid = os.fork()
        if pid == 0:
            return end
        running[end] = pid
    codes = {end: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for end, pid in running.items()}
    print(json.dumps(codes))

end = codes(["nothing", "end_training", "error", "exit 3"])
if end is not None:
    child(end)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_thread_that_is_not_done_does_not_abort_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LEAVING], env=environment, capture_output=True, text=True, timeout=90, check=True
    )
    expected = {"nothing": 0, "end_training": 0, "error": 1, "exit 3": 3}
    assert json.loads(done.stdout) == expected, done.stderr
    assert "terminate called" not in done.stderr
