"""A child that is forked while a thread of its parent holds a lock can take this lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.forks import new_lock, new_rlock
from tests.preloaded import run


def works_in_a_child(work: Callable[[], object]) -> bool:
    """Whether `work` ends in a forked child of this process."""
    child = os.fork()
    if child == 0:
        threading.Timer(20, os._exit, [1]).start()
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def check_locks() -> None:
    for lock in (new_lock(), new_rlock()):
        taken, done = threading.Event(), threading.Event()

        def hold(lock=lock, taken=taken, done=done) -> None:  # type: ignore[no-untyped-def]
            with lock:
                taken.set()
                done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        taken.wait()
        assert works_in_a_child(lock.acquire)
        assert not lock.acquire(blocking=False), "the parent's is still taken"
        done.set()
        holder.join()


def check_the_link_of_a_virtual_accelerator() -> None:
    """A copy of 4 KB takes a minute here; that of 4 bytes, 60 ms."""
    virtual.enable(count=1, bandwidth=4096 / 60)
    under_way = threading.Thread(target=lambda: torch.ones(1024).to("virtual:0"), daemon=True)
    under_way.start()
    link = virtual.board.links[0]
    while not link._to_device.locked():
        pass
    assert works_in_a_child(lambda: torch.ones(1).to("virtual:0"))
    os._exit(0)  # the copy has not ended


@pytest.mark.slow
def test_locks_and_links_of_virtual_accelerators_are_free_in_a_child() -> None:
    """In a process without threads of other tests. The check of the link comes last: it ends the process."""
    code = f"from {__name__} import *; check_locks(); check_the_link_of_a_virtual_accelerator()"
    done = run(["-c", code])
    assert done.returncode == 0, done.stderr
