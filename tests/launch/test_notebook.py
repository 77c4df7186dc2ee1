"""Functions started on several processes."""

from __future__ import annotations

import os
import re
import socket

import pytest

from bigmodel.errors import LaunchError
from bigmodel.launch import notebook_launcher

from .conftest import Forked


@pytest.mark.slow
def test_debug_launcher_runs_cpu_processes_that_can_talk(forked: Forked) -> None:
    assert forked.outcomes["forked"] == ""
    assert forked.written("forked") == [[2.0, "cpu", "forked"]] * 2


@pytest.mark.slow
def test_after_a_backward_pass_processes_start_afresh(forked: Forked) -> None:
    assert forked.outcomes["spawned"] == ""
    assert forked.written("spawned") == [[2.0, "cpu", "spawned"]] * 2


@pytest.mark.slow
def test_the_traceback_of_a_failed_process_is_in_the_error(forked: Forked) -> None:
    assert re.match(
        r"ProcessFailedError: Process 1 failed:\n(.*\n)*.*ValueError: not this one", forked.outcomes["failed"]
    )


@pytest.mark.slow
def test_no_folder_of_logs_is_left(forked: Forked) -> None:
    # torch.multiprocessing leaves the traceback of a process that raised.
    assert [name for name in forked.left if not name.startswith("pytorch-errorfile-")] == []


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
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


@pytest.mark.slow
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
