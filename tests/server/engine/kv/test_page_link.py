"""The slots of an accelerator: what is read next is fetched ahead, and each position once."""

from __future__ import annotations

import pytest
import torch

from bigmodel.server.engine.compute.attention import RaggedCache, Span
from bigmodel.server.engine.kv.arena import KVArena, PagedKV

from .pages import DIM, HEADS, LAYERS, B, on_host, step

pytestmark = pytest.mark.usefixtures("every_accelerator")


def test_layers_are_fetched_ahead_from_the_second_step_on() -> None:
    arena = on_host(2)
    assert arena.host is not None
    kv = PagedKV(arena)
    kv.reserve(B)
    step(arena, [Span(kv, 0, 0, 5, 5)], seed=0)
    stats = arena.host.stats
    misses = stats.misses
    step(arena, [Span(kv, 0, 5, 6, 5)], seed=1)
    assert (stats.hits, stats.misses) == (LAYERS, misses)
    assert stats.bytes_from_ram == LAYERS * (5 + 6) * 2 * HEADS * DIM * 4


def test_a_step_that_ends_early_leaves_nothing_that_a_later_one_reads() -> None:
    arena = on_host(2)
    kv = PagedKV(arena)
    kv.reserve(B)
    step(arena, [Span(kv, 0, 0, 5, 5)], seed=0)
    RaggedCache([Span(kv, 0, 5, 6, 5)]).begin()  # its forward fails before any layer
    expected = KVArena(2 * B)
    twin = PagedKV(expected)
    twin.reserve(B)
    step(expected, [Span(twin, 0, 0, 5, 5)], seed=0)
    for read in zip(step(arena, [Span(kv, 0, 5, 6, 5)], 1), step(expected, [Span(twin, 0, 5, 6, 5)], 1), strict=True):
        assert all(torch.equal(*each) for each in zip(*read, strict=True))


def test_positions_that_several_calls_attend_to_are_fetched_once() -> None:
    arena = on_host(8)
    kv = PagedKV(arena)
    kv.reserve(3 * B)
    step(arena, [Span(kv, 0, 0, B, 3 * B)], seed=0)
    assert arena.host is not None
    before = arena.host.stats.bytes_from_ram
    step(arena, [Span(kv, 0, B, 3 * B, 3 * B)], seed=1)  # two calls: the second attends to all of the first
    assert arena.host.stats.bytes_from_ram - before == LAYERS * 3 * B * 2 * HEADS * DIM * 4
