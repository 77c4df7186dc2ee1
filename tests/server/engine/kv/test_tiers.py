"""Pages in RAM and in a file: what is read is what was written, wherever it lies, also where the disk fails."""

from __future__ import annotations

import errno
import gc
import os
import random
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bigmodel.dispatch.transfer.files import SourceFile
from bigmodel.errors import KVDiskError
from bigmodel.limits import KV_SPARE_PAGES
from bigmodel.server.engine.compute.attention import RaggedCache, Span
from bigmodel.server.engine.kv.arena import KVArena, PagedKV
from tests.examples import few

from .pages import DIM, HEADS, LAYERS, B, on_disk, step

pytestmark = pytest.mark.usefixtures("every_accelerator")


@pytest.mark.slow
@settings(max_examples=few(1))
@example(1, 6)  # a step whose pages are others than those that were read ahead for it
@given(st.integers(0, 2**31), st.integers(5, 8))
def test_texts_that_come_and_go_read_what_they_wrote_whatever_lies_on_disk(
    tmp_path_factory: pytest.TempPathFactory, seed: int, frames: int
) -> None:
    texts_come_and_go(tmp_path_factory.mktemp("kv"), seed, frames, prompts=5 * B, beyond=5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1000)
@settings(max_examples=few(10))
@example(3553829, 5)  # a step whose pages are others than those that were read ahead for it
@given(st.integers(0, 2**31), st.integers(5, 8))
def test_long_texts_that_are_computed_again_read_what_they_wrote(
    tmp_path_factory: pytest.TempPathFactory, seed: int, frames: int
) -> None:
    texts_come_and_go(tmp_path_factory.mktemp("kv"), seed, frames, prompts=2 * B, beyond=5 * B)


def texts_come_and_go(folder: Path, seed: int, frames: int, prompts: int, beyond: int) -> None:
    """Random steps: texts begin, grow, mostly by one token, take tokens back, end; the twin has all pages on the
    accelerator. Prompts have fewer than `prompts` tokens. A step computes at most `beyond` tokens behind one, each of
    which attends by a call of its own."""
    drawn = random.Random(seed)
    arenas = KVArena(12 * B), on_disk(folder, 12, frames)
    texts: list[tuple[int, int, tuple[PagedKV, PagedKV]]] = []  # tokens, those of prompts, keys and values in both
    for turn in range(24):
        if texts and drawn.random() < 0.1:
            texts.pop(drawn.randrange(len(texts)))
        if len(texts) < 2 and drawn.random() < 0.5:
            texts.append((0, drawn.randrange(1, prompts), (PagedKV(arenas[0]), PagedKV(arenas[1]))))
        if not texts:
            continue
        by_one = drawn.random() < 0.6
        spans: tuple[list[Span], list[Span]] = [], []
        row, grown = 0, []
        for length, prompt, kvs in texts:
            start = length if by_one else max(length - drawn.choice([0, 0, 3]), 0)
            most = min(5 * B, max(prompt, start) + beyond)
            end = min(start + (1 if by_one and length else drawn.choice([1, 5, B, B + 7])), most)
            start = min(start, end - 1)
            for kv, own in zip(kvs, spans, strict=True):
                kv.reserve(-(-end // B) * B)
                own.append(Span(kv, row, start, end, prompt))
            row += end - start
            grown.append((end, prompt, kvs))
        texts = grown
        expected, found = (step(arena, own, turn) for arena, own in zip(arenas, spans, strict=True))
        assert all(torch.equal(a, b) for one, other in zip(expected, found, strict=True) for a, b in zip(one, other))
    for length, _, kvs in texts:
        for layer in range(LAYERS):
            both = (each.span(layer, 0, length) for each in kvs)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(*both, strict=True))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_page_that_is_written_to_again_is_read_as_it_is_now(tmp_path: Path) -> None:
    """Tokens are taken back from a page that the disk has, too; when RAM has it no more, all of it is read."""
    kvs = [PagedKV(arena) for arena in (on_disk(tmp_path, 10, 5), KVArena(10 * B))]
    whole = [(page * B, (page + 1) * B) for page in range(9)]
    for seed, (begin, end) in enumerate([*whole[:5], (3 * B + 5, 3 * B + 6), (3 * B + 6, 4 * B), *whole[4:]]):
        read = []
        for kv in kvs:
            kv.reserve(-(-end // B) * B)
            read.append(step(kv.arena, [Span(kv, 0, begin, end, 10 * B)], seed))
        assert all(torch.equal(a, b) for one, other in zip(*read, strict=True) for a, b in zip(one, other, strict=True))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_read_ahead_that_fails_ends_only_the_step_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas = on_disk(tmp_path, 8, 5), KVArena(8 * B)
    kvs = [(PagedKV(arena), PagedKV(arena)) for arena in arenas]
    for long, short in kvs:
        long.reserve(7 * B)
        short.reserve(B)
        for page in range(6):
            step(long.arena, [Span(long, 0, page * B, (page + 1) * B, 6 * B)], seed=page)
        step(long.arena, [Span(short, 0, 0, 5, 5)], seed=7)
    right, expected, fails = os.preadv, RaggedCache.ahead, False

    def ahead(cache: RaggedCache, window: int | None) -> object:
        nonlocal fails
        fails = True
        return expected(cache, window)

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fails and offset < os.fstat(descriptor).st_size // LAYERS:  # of the first layer
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return right(descriptor, buffers, offset)

    monkeypatch.setattr(RaggedCache, "ahead", ahead)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(SourceFile, "view_cached", lambda *_: None)
    first = [step(long.arena, [Span(long, 0, 6 * B, 6 * B + 1, 6 * B)], seed=8) for long, _ in kvs]
    other = [step(short.arena, [Span(short, 0, 5, 6, 5)], seed=9) for _, short in kvs]
    fails = False
    step(arenas[0], [Span(kvs[0][0], 0, 6 * B + 1, 6 * B + 2, 6 * B)], seed=10)
    fails = True
    with pytest.raises(KVDiskError, match="cannot be read from disk"):
        step(arenas[0], [Span(kvs[0][0], 0, 6 * B + 2, 6 * B + 3, 6 * B)], seed=11)
    monkeypatch.undo()
    for number in (1, 2):
        span = 6 * B + number, 6 * B + number + 1, 6 * B
        last = [step(long.arena, [Span(long, 0, *span)], seed=9 + number) for long, _ in kvs]
        first = [a + b for a, b in zip(first, last, strict=True)]
    for found in (first, other):
        pairs = zip(*found, strict=True)
        assert all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


@pytest.mark.slow
def test_a_page_that_cannot_be_read_again_is_an_error_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = on_disk(tmp_path, 8, 5)
    kv = PagedKV(arena)
    kv.reserve(8 * B)
    for page in range(8):
        step(arena, [Span(kv, 0, page * B, (page + 1) * B, 8 * B)], seed=page)
    expected = kv.span(0, 0, 8 * B)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(KVDiskError, match="ends too early"):
        kv.span(0, 0, 8 * B)
    with pytest.raises(KVDiskError, match="ends too early"):
        step(arena, [Span(kv, 0, 3, 4, 8 * B)], seed=9)
    monkeypatch.undo()
    assert all(torch.equal(*both) for both in zip(kv.span(0, 0, 8 * B), expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0, OSError(errno.EIO, os.strerror(errno.EIO))], ids=["short", "error"])
def test_a_step_that_cannot_read_holds_no_page_once_it_has_failed(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = on_disk(tmp_path, 6, 4)
    kv = PagedKV(arena)
    kv.reserve(6 * B)
    for page in range(6):
        step(arena, [Span(kv, 0, page * B, (page + 1) * B, 6 * B)], seed=page)
    monkeypatch.setattr(os, "preadv", Mock(side_effect=[wrong] * 100))
    monkeypatch.setattr(SourceFile, "view_cached", lambda *_: None)
    gc.disable()  # nothing waits for a collection
    try:
        with pytest.raises(KVDiskError):
            step(arena, [Span(kv, 0, 6 * B - 1, 6 * B, 6 * B)], seed=9)
        del kv
        assert len(arena.free) == 6
    finally:
        gc.enable()
