"""Pages on the host, read through slots: what an arena on the accelerator holds, copied ahead of use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.server.engine.compute.attention import Span
from bigmodel.server.engine.kv.arena import KVArena, PagedKV
from tests.examples import few

from .pages import DIM, HEADS, LAYERS, B, on_disk, on_host, step

pytestmark = pytest.mark.usefixtures("every_accelerator")

LENGTHS = st.integers(1, 2 * B) | st.sampled_from([B - 2, B, 2 * B - 2])
"""Of prompts; each token behind one is attended to by a call of its own."""


@pytest.mark.slow
@settings(max_examples=few(6), deadline=None)
@given(
    st.lists(st.tuples(LENGTHS, st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_is_read_is_what_an_arena_on_the_accelerator_holds(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], slots: int, disk: bool
) -> None:
    host = on_disk(tmp_path_factory.mktemp("kv"), 9, 6, [0, 2], slots) if disk else on_host(9, [0, 2], slots)
    arenas = KVArena(9 * B), host
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


def test_memory_of_the_host_is_that_of_all_pages() -> None:
    arena = on_host(4)
    kv = PagedKV(arena)
    kv.reserve(B)
    kv.write(1, 0, torch.ones(HEADS, 3, DIM), torch.ones(HEADS, 3, DIM))
    assert [each.nbytes for each in arena.layer(1)] == [4 * B * HEADS * DIM * 4] * 2
    assert arena.layers() == [1]
