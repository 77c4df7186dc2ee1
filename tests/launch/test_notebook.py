"""Functions started on several processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from bigmodel.errors import LaunchError
from bigmodel.launch import debug_launcher, notebook_launcher


def collect(folder: Path, precision: str) -> None:
    from bigmodel.train import Accelerator

    accelerator = Accelerator()
    total = accelerator.reduce(torch.ones(1), "sum").item()
    assert accelerator.mixed_precision == precision
    (folder / f"{accelerator.process_index}.txt").write_text(f"{total} {accelerator.device}")
    accelerator.end_training()


def fail(rank: str) -> None:
    if os.environ["RANK"] == rank:
        raise ValueError("not this one")


def test_debug_launcher_runs_cpu_processes_that_can_talk(tmp_path: Path) -> None:
    debug_launcher(collect, (tmp_path, "no"), num_processes=2)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["2.0 cpu", "2.0 cpu"]
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_the_traceback_of_a_failed_process_is_in_the_error() -> None:
    with pytest.raises(LaunchError, match=r"Process 1 failed:\n(.*\n)*.*ValueError: not this one"):
        debug_launcher(fail, ("1",))


def test_one_process_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    notebook_launcher(
        lambda value: seen.append((value, os.environ["ACCELERATE_MIXED_PRECISION"])),
        (3,),
        num_processes=1,
        mixed_precision="bf16",
        cpu=True,
    )
    assert seen == [(3, "bf16")]


def test_a_busy_port_and_too_many_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(LaunchError, match="cannot be used on this machine"):
            notebook_launcher(print, num_processes=2, use_port=other.getsockname()[1], cpu=True)
    with pytest.raises(LaunchError, match="needs 64 GPUs"):
        notebook_launcher(print, num_processes=64, cpu=False)
    with pytest.raises(LaunchError, match="mixed_precision is 'fp4'"):
        notebook_launcher(print, mixed_precision="fp4", cpu=True)


def test_a_notebook_that_has_used_cuda_is_told_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="CUDA was already used in this process"):
        notebook_launcher(print, num_processes=2)
