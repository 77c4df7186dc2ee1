"""Pages in RAM and in a file: what is read is what was written, wherever it lies, also where the disk fails."""

from __future__ import annotations

import errno
import gc
import os
import random
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.errors import KVDiskError
from bigmodel.limits import KV_SPARE_PAGES
from bigmodel.server.engine.compute.attention import Span
from bigmodel.server.engine.kv.arena import KVArena, PagedKV

from .pages import DIM, HEADS, LAYERS, B, on_disk, step

pytestmark = pytest.mark.usefixtures("every_accelerator")


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.integers(5, 8))
def test_texts_that_come_and_go_read_what_they_wrote_whatever_lies_on_disk(
    tmp_path_factory: pytest.TempPathFactory, seed: int, frames: int
) -> None:
    """Random steps: texts begin, grow, take tokens back, end; the twin has all pages on the accelerator."""
    drawn = random.Random(seed)
    arenas = KVArena(12 * B), on_disk(tmp_path_factory.mktemp("kv"), 12, frames)
    texts: list[tuple[int, tuple[PagedKV, PagedKV]]] = []  # tokens, and their keys and values in both
    for turn in range(12):
        if texts and drawn.random() < 0.2:
            texts.pop(drawn.randrange(len(texts)))
        if len(texts) < 2:
            kvs = PagedKV(arenas[0]), PagedKV(arenas[1])
            texts.append((0, kvs))
        spans: tuple[list[Span], list[Span]] = [], []
        row, grown = 0, []
        for length, kvs in texts:
            start = max(length - drawn.choice([0, 0, 3]), 0)
            end = min(start + drawn.choice([1, 5, B, B + 7]), 5 * B)
            start = min(start, end - 1)
            for kv, own in zip(kvs, spans, strict=True):
                kv.reserve(-(-end // B) * B)
                own.append(Span(kv, row, start, end, 5 * B))
            row += end - start
            grown.append((end, kvs))
        texts = grown
        expected, found = (step(arena, own, turn) for arena, own in zip(arenas, spans, strict=True))
        assert all(torch.equal(a, b) for one, other in zip(expected, found, strict=True) for a, b in zip(one, other))
    for length, kvs in texts:
        for layer in range(LAYERS):
            both = (each.span(layer, 0, length) for each in kvs)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(*both, strict=True))


def test_older_pages_are_read_from_the_disk_and_their_space_is_given_back(tmp_path: Path) -> None:
    arena = on_disk(tmp_path, 8, 5)
    assert arena.host is not None
    assert arena.host.tiers is not None
    kv = PagedKV(arena)
    kv.reserve(8 * B)
    for page in range(8):
        step(arena, [Span(kv, 0, page * B, (page + 1) * B, 8 * B)], seed=page)
    stats, page_bytes = arena.host.stats, B * HEADS * DIM * 2 * 4
    before = stats.bytes_from_disk
    step(arena, [Span(kv, 0, 8 * B - 1, 8 * B, 8 * B)], seed=9)
    assert stats.bytes_from_disk - before == 3 * LAYERS * page_bytes
    held, there = arena.host.tiers.used
    assert (held, 3 <= there <= 3 + KV_SPARE_PAGES) == (5, True)
    space = arena.host.tiers.older.disk.space
    assert 3 * LAYERS * page_bytes <= space <= (3 + KV_SPARE_PAGES) * LAYERS * page_bytes
    assert not os.listdir(tmp_path), "the file has no name: nothing is left of it, however the process ends"
    del kv
    gc.collect()
    other = PagedKV(arena)
    other.reserve(B)
    step(arena, [Span(other, 0, 0, 1, 1)], seed=0)
    assert arena.host.tiers.used == (1, 0)
    assert arena.host.tiers.older.disk.space == 0
    pages = weakref.ref(arena.host.tiers)
    disk = arena.host.tiers.older.disk
    del arena, other
    gc.collect()
    assert pages() is None
    assert disk.space == 0


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_fails_a_step_that_needs_memory_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = on_disk(tmp_path, 8, 3)
    twin = KVArena(8 * B)
    kvs = [(PagedKV(each), PagedKV(each)) for each in (arena, twin)]
    for long, short in kvs:
        long.reserve(4 * B)
        short.reserve(B)
    monkeypatch.setattr(os, "pwrite", full)
    for each, (long, short) in zip((arena, twin), kvs, strict=True):
        step(each, [Span(short, 0, 0, 5, 5)], seed=0)
        step(each, [Span(long, 0, 0, 2 * B, 4 * B)], seed=1)
    with pytest.raises(KVDiskError, match=r"cannot be written to disk \(No space left"):
        step(arena, [Span(kvs[0][0], 0, 2 * B, 3 * B, 4 * B)], seed=2)
    read = [step(each, [Span(short, 0, 5, 6, 5)], 3) for each, (_, short) in zip((arena, twin), kvs, strict=True)]
    assert all(torch.equal(a, b) for one, other in zip(*read, strict=True) for a, b in zip(one, other, strict=True))
    monkeypatch.undo()
    read = [step(each, [Span(long, 0, 2 * B, 3 * B, 4 * B)], 4) for each, (long, _) in zip((arena, twin), kvs)]
    assert all(torch.equal(a, b) for one, other in zip(*read, strict=True) for a, b in zip(one, other, strict=True))
