"""Whole launches: processes that meet, fail, restart, and span two machines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.preloaded import Program
from tests.train.multiprocess import run_script

from .starting import launched, start_launch

CONFIGS = Path(__file__).parent / "configs"

REPORT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS")
report = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
os.write(1, json.dumps(report).encode() + b"\\n")  # whole, beside those of other processes
"""

FAIL = """
import os, time
rank = int(os.environ["RANK"])
if rank == 1:
    raise ValueError("the data is gone")
time.sleep(60)
"""

FAIL_ONCE = """
import os, sys, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0":
    sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(60)
os.write(1, f"attempt {attempt}\\n".encode())
"""

TRAIN = """
import json, sys
import torch
from bigmodel.train import Accelerator
accelerator = Accelerator(mixed_precision="no")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(10, 8, 4)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for batch in data:
    mine = batch.chunk(accelerator.num_processes)[accelerator.process_index]
    loss = model(mine).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
if accelerator.is_main_process:
    open(sys.argv[1], "w").write(json.dumps([accelerator.num_processes, losses]))
accelerator.free_memory(model, optimizer)
del model, optimizer
accelerator.end_training()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_single_process_is_the_script_itself(tmp_path: Path) -> None:
    done = launched("--cpu", script(tmp_path, REPORT), "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["argv"] == ["--lr", "0.1"]
    assert (told["RANK"], told["ACCELERATE_USE_CPU"], told["OMP_NUM_THREADS"]) == (None, "true", "1")


@pytest.mark.slow
def test_its_exit_code_and_traceback_are_those_of_the_job(tmp_path: Path) -> None:
    done = launched("--cpu", script(tmp_path, "import sys; print('bye', file=sys.stderr); sys.exit(7)"))
    assert (done.returncode, done.stderr) == (7, "bye\n")


@pytest.mark.slow
def test_processes_get_numbers_and_settings(tmp_path: Path) -> None:
    config = CONFIGS / "two_processes_fp16.yaml"
    done = launched("--config_file", config, "--cpu", "--distributed_type", "MULTI_CPU", script(tmp_path, REPORT))
    assert done.returncode == 0, done.stderr
    told = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda item: item["RANK"])
    assert [(item["RANK"], item["WORLD_SIZE"], item["LOCAL_RANK"]) for item in told] == [
        ("0", "2", "0"),
        ("1", "2", "1"),
    ]
    assert {item["ACCELERATE_MIXED_PRECISION"] for item in told} == {"fp16"}


@pytest.mark.slow
def test_a_process_that_dies_ends_the_job_with_its_traceback_first(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = launched("--cpu", "--num_processes", 2, script(tmp_path, FAIL), env={"TMPDIR": str(temporary)})
    assert done.returncode == 1
    assert not list(temporary.iterdir())
    lines = done.stderr.splitlines()
    assert lines[0].endswith("Traceback (most recent call last):")
    assert any("ValueError: the data is gone" in line for line in lines)
    assert lines[-1].startswith("bigmodel launch: process 1 (pid ")
    assert "exited with code 1" in lines[-1]
    assert not any("torch/distributed" in line for line in lines)


@pytest.mark.slow
def test_a_killed_process_is_said_to_be_killed(tmp_path: Path) -> None:
    text = (
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '0' else time.sleep(60)"
    )
    done = launched("--cpu", "--num_processes", 2, script(tmp_path, text))
    assert done.returncode == 128 + signal.SIGKILL
    assert "process 0 (pid" in done.stderr
    assert "was killed by SIGKILL" in done.stderr


@pytest.mark.slow
def test_all_processes_are_restarted_after_one_fails(tmp_path: Path) -> None:
    done = launched("--cpu", "--num_processes", 2, "--max_restarts", 2, script(tmp_path, FAIL_ONCE))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["attempt 1"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ctrl_c_stops_every_process(tmp_path: Path, processes: int) -> None:
    # One write for each line: both processes share the pipe.
    text = "import os, time\nos.write(1, f'{os.getpid()}\\n'.encode())\ntime.sleep(60)"
    job = start_launch("--cpu", "--num_processes", 2, script(tmp_path, text))
    assert job.stdout is not None
    # Also while the second process is just being started.
    numbers = [int(job.stdout.readline()) for _ in range(processes)]
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpu", "missing.py"], "The training script missing.py does not exist."),
        (["--multi_gpu", "--num_processes", 64, __file__], "needs 64 GPUs here"),
        (["--config_file", "missing.yaml", __file__], "The configuration file missing.yaml does not exist"),
    ],
)
def test_what_cannot_run_is_one_line(arguments: list[object], message: str) -> None:
    done = launched(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_two_machines_train_one_model(tmp_path: Path) -> None:
    path, port = script(tmp_path, TRAIN), free_port()
    both: list[Program] = []
    for rank in (1, 0):
        config = CONFIGS / "two_machines_four_processes.yaml"
        flags = ["--config_file", config, "--cpu", "--distributed_type", "MULTI_CPU", "--num_processes", 2]
        flags += ["--machine-rank", rank, "--main-process-port", port]
        both.append(start_launch(*flags, path, tmp_path / f"{rank}.json", fork_ranks=True))
    outputs = [machine.communicate(timeout=100) for machine in both]
    assert [machine.returncode for machine in both] == [0, 0], outputs
    run_script([path, tmp_path / "alone.json"])
    processes, losses = json.loads((tmp_path / "0.json").read_text())
    _, expected = json.loads((tmp_path / "alone.json").read_text())
    assert processes == 2
    assert not (tmp_path / "1.json").exists()
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_machines_that_cannot_meet_are_one_clear_error(tmp_path: Path) -> None:
    flags = ["--cpu", "--num_machines", 2, "--machine_rank", 1, "--main_process_ip", "127.0.0.1"]
    timeout = ["--rdzv_conf", "timeout=1,join_timeout=1"]
    done = launched(*flags, "--main_process_port", free_port(), *timeout, script(tmp_path, REPORT))
    assert done.returncode != 0
    assert "could not meet at 127.0.0.1" in done.stderr
    assert "Check main_process_ip, main_process_port" in done.stderr
