"""Prefix cache: keys and values of prompt blocks, kept for later prompts that begin the same way."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV, TokenPool

Key = tuple[int, tuple[int, ...]]  # serial of the parent block (0: none), and the tokens of this one

_serials = itertools.count(1)


@dataclass
class PrefixBlock:
    """Keys and values of :data:`PROMPT_BLOCK` positions, as `SequenceKV.cut` gave them, and the place in the tree."""

    content: object
    parent: PrefixBlock | None
    children: int = 0
    serial: int = field(default_factory=lambda: next(_serials))


@dataclass
class PrefixCache:
    """A tree of whole prompt blocks, keyed by parent block and tokens; least recently used leaves are evicted first.

    Only whole blocks are kept: every request computes them the same way, so a request served from the cache gets the
    bits it would have computed itself. Keys hold the tokens themselves, not a hash of them: no collision is possible.

    ``hits`` and ``lookups`` count prompt tokens served from the cache and looked up in it.
    """

    pool: TokenPool
    enabled: bool = True
    hits: int = 0
    lookups: int = 0
    _blocks: OrderedDict[Key, PrefixBlock] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, prompt: list[int]) -> int:
        """Number of leading tokens of ``prompt`` that are cached; fewer than all, so that the last one gives logits."""
        return PROMPT_BLOCK * len(self._walk(prompt, (len(prompt) - 1) // PROMPT_BLOCK))

    def copy_into(self, kv: SequenceKV, prompt: list[int], tokens: int) -> None:
        """Give ``kv`` the first ``tokens`` cached positions of ``prompt``."""
        for index, block in enumerate(self._walk(prompt, tokens // PROMPT_BLOCK)):
            kv.put(index, block.content)

    def insert(self, kv: SequenceKV, prompt: list[int]) -> None:
        """Cache the whole blocks of a computed ``prompt``, as far as the pool has free positions."""
        if not self.enabled:
            return
        blocks = len(prompt) // PROMPT_BLOCK
        path = self._walk(prompt, blocks)
        for index in range(len(path), blocks):
            if not self.pool.take(PROMPT_BLOCK):
                return
            parent = path[-1] if path else None
            try:
                path.append(PrefixBlock(_cut(kv, index), parent))
            except BaseException:
                self.pool.give_back(PROMPT_BLOCK)
                raise
            self._blocks[_key(parent, prompt, index)] = path[-1]
            if parent is not None:
                parent.children += 1

    def shrink(self, positions: int) -> bool:
        """Evict blocks until ``positions`` are free in the pool; False, and nothing evicted, if that is impossible."""
        if self.pool.free + PROMPT_BLOCK * len(self._blocks) < positions:
            return False
        while self.pool.free < positions:
            # Leaves first: a block whose parent is gone could not be found.
            self._drop(next(key for key, block in self._blocks.items() if not block.children))
        return True

    def clear(self) -> None:
        """Evict everything."""
        self.shrink(self.pool.free + PROMPT_BLOCK * len(self._blocks))

    def _walk(self, prompt: list[int], limit: int) -> list[PrefixBlock]:
        """Cached blocks that ``prompt`` begins with, at most ``limit``; marks them as recently used."""
        path: list[PrefixBlock] = []
        while self.enabled and len(path) < limit:
            key = _key(path[-1] if path else None, prompt, len(path))
            block = self._blocks.get(key)
            if block is None:
                break
            self._blocks.move_to_end(key)
            path.append(block)
        return path

    def _drop(self, key: Key) -> None:
        block = self._blocks.pop(key)
        if block.parent is not None:
            block.parent.children -= 1
        self.pool.give_back(PROMPT_BLOCK)


def _key(parent: PrefixBlock | None, prompt: list[int], index: int) -> Key:
    return (parent.serial if parent else 0, tuple(prompt[index * PROMPT_BLOCK : (index + 1) * PROMPT_BLOCK]))


def _cut(kv: SequenceKV, index: int) -> object:
    return kv.cut(index)
