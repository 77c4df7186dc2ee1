"""Pages of keys and values: never moved, shared with cached prefixes, free again when nobody holds them."""

from __future__ import annotations

import pytest
import torch

from bigmodel.server.engine.kv.arena import KVArena, PagedKV
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV, TokenPool
from bigmodel.server.engine.kv.prefix import PrefixCache

B = PROMPT_BLOCK


def written(kv: SequenceKV, tokens: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Write random keys and values of two heads; return them."""
    key, value = torch.randn(2, tokens, 3), torch.randn(2, tokens, 3)
    kv.write(0, start, key, value)
    return key, value


def test_pages_hold_what_contiguous_buffers_hold() -> None:
    arena = KVArena(6 * B)
    kvs: list[SequenceKV] = [PagedKV(arena), PagedKV(arena), SequenceKV()]
    for block in range(2):  # pages of the two sequences alternate in the arena
        for kv in kvs:
            kv.reserve((block + 1) * B)
        torch.manual_seed(block)
        key, value = torch.randn(2, B, 3), torch.randn(2, B, 3)
        for kv in kvs:
            kv.write(0, block * B, key, value)
    for start, end in ((0, 2 * B), (B - 1, B + 1), (5, 5)):
        expected = kvs[2].span(0, start, end)
        for kv in kvs[:2]:
            assert all(torch.equal(*pair) for pair in zip(kv.span(0, start, end), expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(kvs[0].layer(0), kvs[2].layer(0), strict=True))


def test_memory_is_allocated_once_and_is_what_was_planned() -> None:
    arena = KVArena(4 * B)
    kv = PagedKV(arena)
    kv.reserve(B)
    written(kv, 10)
    keys, values = arena.layer(0)
    assert keys.nbytes + values.nbytes == 4 * B * 2 * (2 * 3 * 4)
    kv.reserve(4 * B)
    written(kv, 3 * B, start=B)
    assert [each.data_ptr() for each in arena.layer(0)] == [keys.data_ptr(), values.data_ptr()]


def test_what_a_step_allocates_is_written_between_steps_too() -> None:
    kv = PagedKV(KVArena(B))
    kv.reserve(B)
    with torch.inference_mode():
        written(kv, 3)
    key, value = written(kv, 4, start=3)
    assert all(torch.equal(*pair) for pair in zip(kv.span(0, 3, 7), (key, value), strict=True))


def test_pages_are_free_again_when_the_sequence_is_gone() -> None:
    arena = KVArena(2 * B)
    kv = PagedKV(arena)
    kv.reserve(2 * B)
    with pytest.raises(RuntimeError, match="all 2 pages"):
        PagedKV(arena).reserve(1)
    del kv
    PagedKV(arena).reserve(2 * B)
    assert sorted(arena.free) == [0, 1]


def test_a_cached_prefix_is_the_page_itself() -> None:
    arena, cache = KVArena(4 * B), PrefixCache(TokenPool(8 * B))
    first, prompt = PagedKV(arena), [1] * B + [2] * 5
    first.reserve(2 * B)
    key, _ = written(first, B + 5)
    cache.insert(first, prompt)
    shared = first.pages[0]
    del first
    second = PagedKV(arena)
    second.reserve(2 * B)
    cache.copy_into(second, prompt, B)
    assert second.pages[0] is shared
    assert torch.equal(second.span(0, 0, B)[0], key[:, :B])
    assert len(arena.free) == 2
    del second, shared
    cache.clear()
    assert len(arena.free) == 4


def test_positions_beyond_the_reservation_are_refused() -> None:
    kv = PagedKV(KVArena(B))
    kv.reserve(4)
    with pytest.raises(RuntimeError, match="position 5 is past the 4"):
        kv.write(0, 3, torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))
