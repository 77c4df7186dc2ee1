"""A process ends with its own exit code, whatever PyTorch's threads are doing at that moment."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from bigmodel.devices import native_threads
from bigmodel.devices.native_threads import let_threads_finish

from .conftest import Ended


@pytest.mark.slow
def test_a_thread_that_is_not_done_does_not_abort_the_process(own_process: Ended) -> None:
    assert (own_process.code, own_process.found["gradient"]) == (0, 6.0), own_process.errors


@pytest.mark.slow
def test_a_thread_that_has_not_begun_begins_before_the_process_ends(own_process: Ended) -> None:
    """PyTorch waits ten seconds for one that never does."""
    assert own_process.found["not begun"] == []


STATUS = "Name:\t{}\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t1\n"


def test_a_thread_that_ran_between_two_checks_is_waited_for_although_it_sleeps_at_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "7" / "status"
    status.parent.mkdir()
    status.write_text(STATUS.format("worker of torch", 0))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        status.write_text(STATUS.format("worker of torch", min(len(pauses), 20)))  # it finds the GIL taken 20 times

    monkeypatch.setattr(native_threads, "_TASKS", tmp_path)
    monkeypatch.setattr(time, "sleep", pause)
    let_threads_finish("worker")
    assert len(pauses) == 24


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's folder of threads, of which this process has its first one and another of Python."""
    (tmp_path / "tasks").mkdir()
    monkeypatch.setattr(native_threads, "_TASKS", tmp_path / "tasks")
    show(tmp_path / "tasks", os.getpid(), "program", 3)
    return tmp_path / "tasks"


def show(tasks: Path, number: int, name: str, switches: int) -> None:
    (tasks / str(number)).mkdir(exist_ok=True)
    (tasks / str(number) / "status").write_text(STATUS.format(name, switches))


def test_waiting_ends_at_once_without_such_threads(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show(tasks, os.getpid() + 1, "reader", 5)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    let_threads_finish("worker")
    assert not pauses


def test_a_thread_that_has_no_name_yet_is_waited_for(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets one when it has begun, for which it needs the GIL."""
    number, pauses = os.getpid() + 1, list[float]()
    show(tasks, number, "program", 1)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        show(tasks, number, "program" if len(pauses) < 10 else "worker 0", min(len(pauses), 10))

    monkeypatch.setattr(time, "sleep", pause)
    let_threads_finish("worker")
    assert len(pauses) == 14


def test_other_threads_of_python_are_not_waited_for(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert other.native_id is not None
        show(tasks, other.native_id, "program", 1)
        monkeypatch.setattr(time, "sleep", pauses.append)
        let_threads_finish("worker")
        assert not pauses
    finally:
        done.set()
        other.join()


@pytest.mark.skipif(sys.platform != "linux", reason="states of threads are those of Linux")
def test_the_kernel_tells_the_states_of_threads() -> None:
    name = Path("/proc/self/comm").read_text().strip()
    assert native_threads._states(name)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_child_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to Python 3.12, the first thread of a child says that it has the number of its parent's."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    child = os.fork()
    if child == 0:
        let_threads_finish("no such thread")
        os._exit(min(len(pauses), 100))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
