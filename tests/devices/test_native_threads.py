"""A process ends with its own exit code, whatever PyTorch's threads are doing at that moment."""

from __future__ import annotations

import sys
import time

import pytest

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
