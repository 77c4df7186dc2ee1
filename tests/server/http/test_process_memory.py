"""The memory of a server's process."""

from __future__ import annotations

import os
import platform
import threading

import psutil
import pytest

from bigmodel.server.http import process_memory
from bigmodel.server.http.process_memory import ARENAS, return_beside_the_next_load, return_freed_memory
from tests.preloaded import run

BLOCK = 100_000  # bytes: below the size from which malloc maps each block by itself


def test_memory_between_blocks_in_use_is_returned() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    blocks = [b"x" * BLOCK for _ in range(1000)]
    used = process.memory_info().rss - before
    kept = blocks[::50]
    del blocks
    return_freed_memory()
    assert process.memory_info().rss - before < used / 2
    assert len(kept) == 20


def test_it_is_returned_beside_the_next_load(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, returned = threading.Event(), threading.Event()

    def slowly() -> None:
        loaded.wait(60)
        returned.set()

    monkeypatch.setattr(process_memory, "return_freed_memory", slowly)
    return_beside_the_next_load()
    assert not returned.is_set()
    loaded.set()
    assert returned.wait(60)


THREADS_THAT_ALLOCATE = """
import ctypes, sys, threading
from bigmodel.server.http.process_memory import use_few_arenas

use_few_arenas()
libc = ctypes.CDLL(None)
together = threading.Barrier(8)

def allocate():
    together.wait()
    for _ in range(2000):
        libc.malloc(2000)  # lets go of the interpreter's lock

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.stdout.flush()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are the GNU C library's")
def test_threads_share_a_few_arenas() -> None:
    done = run(["-c", THREADS_THAT_ALLOCATE], dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert 1 <= done.stdout.count("<heap nr=") <= ARENAS
