"""The prefix cache: whole prompt blocks, found by their tokens, least recently used thrown out first."""

from __future__ import annotations

import torch

from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV, TokenPool
from bigmodel.server.engine.kv.prefix import PrefixCache

B = PROMPT_BLOCK


def computed(tokens: list[int]) -> SequenceKV:
    """Buffers whose key at each position is the token there."""
    kv = SequenceKV()
    kv.reserve(len(tokens))
    keys = torch.tensor(tokens, dtype=torch.float32).reshape(1, -1, 1)
    kv.write(0, 0, keys, keys + 0.5)
    return kv


def prompt(*blocks: int, tail: int = 0) -> list[int]:
    """A prompt of whole blocks, each of one repeated token, and some more."""
    return [token for token in blocks for _ in range(B)] + [99] * tail


def test_a_stored_beginning_is_found_and_copied() -> None:
    cache = PrefixCache(TokenPool(100 * B))
    cache.insert(computed(prompt(1, 2, tail=5)), prompt(1, 2, tail=5))
    assert len(cache) == 2
    assert cache.match(prompt(1, 2, 3)) == 2 * B
    assert cache.match(prompt(1, 3, 2)) == B
    assert cache.match(prompt(2, 1)) == 0
    kv = SequenceKV()
    kv.reserve(3 * B)
    cache.copy_into(kv, prompt(1, 2, 3), 2 * B)
    assert kv.layer(0)[0][0, : 2 * B, 0].tolist() == prompt(1, 2)


def test_the_last_token_is_never_served_from_the_cache() -> None:
    cache = PrefixCache(TokenPool(100 * B))
    cache.insert(computed(prompt(1, 2)), prompt(1, 2))
    assert cache.match(prompt(1, 2)) == B
    assert cache.match(prompt(1)) == 0


def test_blocks_are_shared_between_prompts() -> None:
    pool = TokenPool(100 * B)
    cache = PrefixCache(pool)
    cache.insert(computed(prompt(1, 2)), prompt(1, 2))
    cache.insert(computed(prompt(1, 3)), prompt(1, 3))
    assert (len(cache), pool.used) == (3, 3 * B)


def test_the_prefix_cache_stores_only_within_free_memory() -> None:
    cache = PrefixCache(TokenPool(2 * B))
    cache.insert(computed(prompt(1, 2, 3)), prompt(1, 2, 3))
    assert cache.match(prompt(1, 2, 3, 4)) == 2 * B


def test_shrinking_evicts_the_least_recently_used_leaf_first() -> None:
    pool = TokenPool(4 * B)
    cache = PrefixCache(pool)
    cache.insert(computed(prompt(1, 2)), prompt(1, 2))
    cache.insert(computed(prompt(5, 6)), prompt(5, 6))
    cache.match(prompt(1, 2, 3))
    assert cache.shrink(B)
    assert cache.match(prompt(5, 6, 7)) == B
    assert cache.match(prompt(1, 2, 3)) == 2 * B
    assert not cache.shrink(5 * B)
    assert len(cache) == 3
    cache.clear()
    assert (len(cache), pool.used) == (0, 0)


def test_a_disabled_prefix_cache_stores_nothing() -> None:
    cache = PrefixCache(TokenPool(4 * B), enabled=False)
    cache.insert(computed(prompt(1, 2)), prompt(1, 2))
    assert (len(cache), cache.match(prompt(1, 2, 3))) == (0, 0)
