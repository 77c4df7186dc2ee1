"""A process ends with its own exit code, whatever PyTorch's threads are doing at that moment."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bigmodel.devices import native_threads
from bigmodel.devices.native_threads import let_threads_finish

from .conftest import Ended


@pytest.mark.slow
def test_a_thread_that_is_not_done_does_not_abort_the_process(own_process: Ended) -> None:
    assert (own_process.code, own_process.found["gradient"]) == (0, 6.0), own_process.errors


def test_waiting_ends_at_once_without_such_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    let_threads_finish("no such thread")
    assert not pauses or sys.platform != "linux"


STATUS = "Name:\tworker of torch\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t1\n"


def test_a_thread_that_ran_between_two_checks_is_waited_for_although_it_sleeps_at_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "7" / "status"
    status.parent.mkdir()
    status.write_text(STATUS.format(0))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        status.write_text(STATUS.format(min(len(pauses), 20)))  # it finds the GIL taken 20 times

    monkeypatch.setattr(native_threads, "_TASKS", tmp_path)
    monkeypatch.setattr(time, "sleep", pause)
    let_threads_finish("worker")
    assert len(pauses) == 24
