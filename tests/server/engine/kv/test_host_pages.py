"""Pages on the host, read through slots: what an arena on the accelerator holds, copied ahead of use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.devices.pinned import empty_weights
from bigmodel.server.engine.compute.attention import RaggedCache, Span
from bigmodel.server.engine.kv.arena import KVArena, PagedKV
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.kv.host_pages import HostPages, consecutive
from tests.accelerators import at

pytestmark = pytest.mark.usefixtures("every_accelerator")

B = PROMPT_BLOCK
LAYERS, HEADS, DIM = 3, 2, 4


def on_host(pages: int, layers: Any = range(LAYERS), slots: int = 2) -> KVArena:
    return KVArena(pages * B, HostPages(pages * B, layers, slots, lambda nbytes: empty_weights(nbytes, pin=True)))


def step(arena: KVArena, spans: list[Span], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write random keys and values of every layer; return what attention reads of each."""
    cache, found, device = RaggedCache(spans), [], torch.device(at(0))
    cache.begin()
    tokens = sum(span.end - span.start for span in spans)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        key, value = (torch.randn(1, HEADS, tokens, DIM, generator=generator).to(device) for _ in range(2))
        with torch.inference_mode():
            cache.update(key, value, layer)
            for number, calls in enumerate(cache.step(device, None).calls):
                host = arena.on_host(layer)
                if host is None:
                    read = tuple(each.index_select(0, calls.gathered) for each in arena.layer(layer))
                else:
                    read = host.read(layer, None, cache.step(device, None).readings, number, device)
                found.append((read[0].cpu(), read[1].cpu()))
    return found


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2 * B), st.integers(1, 40)), min_size=1, max_size=3), st.integers(1, 3))
def test_what_is_read_is_what_an_arena_on_the_accelerator_holds(lengths: list[tuple[int, int]], slots: int) -> None:
    arenas = KVArena(9 * B), on_host(9, [0, 2], slots)
    kvs = [[PagedKV(arena) for _ in lengths] for arena in arenas]
    for turn in range(3):  # the prompts, a few tokens more, one token more
        read = []
        for arena, own in zip(arenas, kvs, strict=True):
            spans, row = [], 0
            for kv, (prompt, more) in zip(own, lengths, strict=True):
                start, end = [(0, prompt), (prompt, prompt + more), (prompt + more, prompt + more + 1)][turn]
                kv.reserve(end)
                spans.append(Span(kv, row, start, end, prompt))
                row += end - start
            read.append(step(arena, spans, seed=turn))
        assert all(torch.equal(a, b) for one, other in zip(*read, strict=True) for a, b in zip(one, other, strict=True))
    for kv, other in zip(*kvs, strict=True):
        for layer in range(LAYERS):
            spans_of = [each.span(layer, 0, other.capacity) for each in (kv, other)]
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*spans_of, strict=True))


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


def test_memory_of_the_host_is_that_of_all_pages() -> None:
    arena = on_host(4)
    kv = PagedKV(arena)
    kv.reserve(B)
    kv.write(1, 0, torch.ones(HEADS, 3, DIM), torch.ones(HEADS, 3, DIM))
    assert [each.nbytes for each in arena.layer(1)] == [4 * B * HEADS * DIM * 4] * 2
    assert arena.layers() == [1]


@pytest.mark.parametrize(
    ("rows", "runs"),
    [([4], [(4, 5)]), ([4, 5, 6], [(4, 7)]), ([4, 5, 9, 1, 2], [(4, 6), (9, 10), (1, 3)]), ([2, 1], [(2, 3), (1, 2)])],
)
def test_consecutive_rows_are_copied_together(rows: list[int], runs: list[tuple[int, int]]) -> None:
    assert consecutive(torch.tensor(rows)) == runs
