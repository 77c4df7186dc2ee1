"""Keys and values of prompt blocks kept after use, for the next prompt that begins the same way."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from bigmodel.server.engine.attention import PROMPT_BLOCK
from bigmodel.server.engine.cache import SequenceKV
from bigmodel.server.engine.pool import TokenPool

Key = tuple[int, tuple[int, ...]]  # serial of the block before (0: none), and the tokens of this one

_serials = itertools.count(1)


@dataclass
class Block:
    """One cached block: the buffers of its :data:`PROMPT_BLOCK` positions per layer, and its place in the tree."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    parent: Block | None
    children: int = 0
    serial: int = field(default_factory=lambda: next(_serials))


@dataclass
class PrefixCache:
    """Whole prompt blocks, each found by the block before it and its own tokens; least recently used go first.

    Only whole blocks of prompts are kept: they are computed the same way in every request, so a request
    served from the cache gets the bits it would have computed itself. The tokens themselves are compared,
    not a hash of them: two prompts never share a block by accident.
    """

    pool: TokenPool
    enabled: bool = True
    hits: int = 0
    lookups: int = 0
    _blocks: OrderedDict[Key, Block] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, prompt: list[int]) -> int:
        """Leading tokens of ``prompt`` that are cached; always fewer than all, so that logits are computed."""
        return PROMPT_BLOCK * len(self._walk(prompt, (len(prompt) - 1) // PROMPT_BLOCK))

    def copy_into(self, kv: SequenceKV, prompt: list[int], tokens: int) -> None:
        """Write the first ``tokens`` cached positions of ``prompt`` into ``kv``."""
        for index, block in enumerate(self._walk(prompt, tokens // PROMPT_BLOCK)):
            for layer, (keys, values) in block.layers.items():
                kv.write(layer, index * PROMPT_BLOCK, keys, values)

    def insert(self, kv: SequenceKV, prompt: list[int]) -> None:
        """Keep the whole blocks of a computed ``prompt``, as far as free positions go."""
        if not self.enabled:
            return
        blocks = len(prompt) // PROMPT_BLOCK
        path = self._walk(prompt, blocks)
        for index in range(len(path), blocks):
            if not self.pool.take(PROMPT_BLOCK):
                return
            parent = path[-1] if path else None
            path.append(Block(_cut(kv, index), parent))
            self._blocks[_key(parent, prompt, index)] = path[-1]
            if parent is not None:
                parent.children += 1

    def shrink(self, positions: int) -> bool:
        """Throw out blocks until ``positions`` are free in the pool; False, and nothing lost, if that cannot be."""
        if self.pool.free + PROMPT_BLOCK * len(self._blocks) < positions:
            return False
        while self.pool.free < positions:
            # Children are thrown out before the block they follow: without it they could not be found.
            self._drop(next(key for key, block in self._blocks.items() if not block.children))
        return True

    def clear(self) -> None:
        """Throw out everything."""
        self.shrink(self.pool.free + PROMPT_BLOCK * len(self._blocks))

    def _walk(self, prompt: list[int], limit: int) -> list[Block]:
        """The cached blocks that ``prompt`` begins with, at most ``limit``; marks them as used."""
        path: list[Block] = []
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


def _key(parent: Block | None, prompt: list[int], index: int) -> Key:
    return (parent.serial if parent else 0, tuple(prompt[index * PROMPT_BLOCK : (index + 1) * PROMPT_BLOCK]))


def _cut(kv: SequenceKV, index: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Copies of the buffers of block ``index``: a view would keep the whole sequence's memory alive."""
    rows = slice(index * PROMPT_BLOCK, (index + 1) * PROMPT_BLOCK)
    return {layer: (kv.layer(layer)[0][:, rows].clone(), kv.layer(layer)[1][:, rows].clone()) for layer in kv.layers()}
