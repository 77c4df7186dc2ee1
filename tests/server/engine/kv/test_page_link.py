"""The slots of an accelerator: what is read next is fetched ahead, and each position once."""

from __future__ import annotations

import pytest
import torch

from bigmodel.server.engine.compute.attention import RaggedCache, Span
from bigmodel.server.engine.kv.arena import KVArena, PagedKV

from .pages import DIM, HEADS, LAYERS, B, on_host, step

ROW = 2 * HEADS * DIM * 4
"""Bytes of the keys and values of a position."""

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
    assert stats.bytes_from_ram == (LAYERS * 5 + 6) * ROW  # those of the first layer for a third step, too


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


def test_the_first_layer_of_the_next_step_is_fetched_while_the_last_one_is_computed() -> None:
    arena = on_host(2)
    assert arena.host is not None
    kv = PagedKV(arena)
    kv.reserve(B)
    step(arena, [Span(kv, 0, 0, 5, 5)], seed=0)
    stats = arena.host.stats
    for length in (5, 6):
        step(arena, [Span(kv, 0, length, length + 1, 5)], seed=1)
    before = stats.bytes_from_ram, stats.hits, stats.misses
    RaggedCache([Span(kv, 0, 7, 8, 5)]).begin()
    assert stats.bytes_from_ram - before[0] == 7 * ROW, "the second layer's: those of the first are there"
    step(arena, [Span(kv, 0, 7, 8, 5)], seed=2)
    assert (stats.hits - before[1], stats.misses - before[2]) == (LAYERS, 0)


@pytest.mark.slow
def test_what_was_fetched_for_another_step_is_not_read() -> None:
    """The next step is not of the texts that were expected, or pages have other contents meanwhile."""
    read = []
    for arena in (on_host(4), KVArena(4 * B)):
        one, other = PagedKV(arena), PagedKV(arena)
        for kv in (one, other):
            kv.reserve(B)
        step(arena, [Span(one, 0, 0, 5, 5), Span(other, 5, 0, 7, 7)], seed=0)
        found = step(arena, [Span(one, 0, 5, 6, 5), Span(other, 1, 7, 8, 7)], seed=1)
        found += step(arena, [Span(other, 0, 8, 9, 7)], seed=2)  # one has ended
        device = arena.layer(0)[0].device
        new = torch.ones(1, HEADS, DIM, device=device)
        with torch.inference_mode():
            arena.write(0, other.rows(2, 3).to(device), new, new)
        found += step(arena, [Span(other, 0, 9, 10, 7)], seed=3)
        third = PagedKV(arena)
        third.reserve(B)
        found += step(arena, [Span(other, 0, 10, 11, 7), Span(third, 1, 0, 3, 3)], seed=4)
        read.append(found)
    assert all(torch.equal(a, b) for one, other in zip(*read, strict=True) for a, b in zip(one, other, strict=True))


def test_positions_that_several_calls_attend_to_are_fetched_once() -> None:
    arena = on_host(8)
    kv = PagedKV(arena)
    kv.reserve(3 * B)
    step(arena, [Span(kv, 0, 0, B, 3 * B)], seed=0)
    assert arena.host is not None
    before = arena.host.stats.bytes_from_ram
    step(arena, [Span(kv, 0, B, 3 * B, 4 * B)], seed=1)  # two calls: the second attends to all of the first
    assert arena.host.stats.bytes_from_ram - before == LAYERS * B * ROW
