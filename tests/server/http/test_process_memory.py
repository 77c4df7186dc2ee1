"""The memory of a server's process."""

from __future__ import annotations

import gc

import psutil

from bigmodel.server.http.process_memory import keep_what_is_loaded, return_freed_memory

BLOCK = 100_000  # bytes: below the size from which malloc maps each block by itself


def test_collections_do_not_look_at_what_was_loaded() -> None:
    frozen = gc.get_freeze_count()
    loaded: list[object] = [[] for _ in range(10_000)]
    try:
        keep_what_is_loaded()
        assert gc.get_freeze_count() >= frozen + len(loaded)
        assert not any(each is loaded for each in gc.get_objects())
    finally:
        if not frozen:
            gc.unfreeze()


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
