"""Prefix cache: keys and values of prompt blocks, kept for later prompts that begin the same way.

With files, blocks are written as soon as they are kept, and read where memory no longer holds them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from bigmodel.server.engine.kv.arena import Page, PagedKV
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV, TokenPool
from bigmodel.server.engine.kv.layer_state import LayerState
from bigmodel.server.engine.kv.prefix_files import BlockFile, HostBlock, LayerKV, PrefixFiles

Key = tuple[int | str, tuple[int, ...]]
"""Serial of the parent block, or of a first one the name of the adapter that computes it ("": none); and its tokens."""

_serials = itertools.count(1)


@dataclass
class PrefixBlock:
    """Keys and values of :data:`PROMPT_BLOCK` positions, as `SequenceKV.cut` gave them, and the place in the tree.

    ``unwritten`` is the file that it has to be written to; ``states`` are those of layers with a recurrent state at its
    end, by layer, if they are kept.
    """

    content: object
    parent: PrefixBlock | None
    children: int = 0
    unwritten: BlockFile | None = None
    serial: int = field(default_factory=lambda: next(_serials))
    states: dict[int, LayerState] | None = None


@dataclass
class PrefixCache:
    """A tree of whole prompt blocks, keyed by parent block and tokens; least recently used leaves are evicted first.

    Only whole blocks are kept: every request computes them the same way, so a request served from the cache gets the
    bits it would have computed itself. Keys hold the tokens themselves, not a hash of them: no collision is possible.

    Of a model with recurrent states a prompt can go on only from a block whose states are kept: those of the last whole
    block of each prompt, and of blocks where prompts part. At most ``states`` blocks have them, the least recently used
    lose them; None: the model has no such states.

    ``adapters`` are digests of what adapters hold, by name, for files: another one may have the name later.

    ``hits`` and ``lookups`` count prompt tokens served from the cache, files included, and looked up in it.
    """

    pool: TokenPool
    enabled: bool = True
    files: PrefixFiles | None = None
    states: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    hits: int = 0
    lookups: int = 0
    _blocks: OrderedDict[Key, PrefixBlock] = field(default_factory=OrderedDict)
    _unwritten: deque[PrefixBlock] = field(default_factory=deque)
    _with_states: OrderedDict[int, PrefixBlock] = field(default_factory=OrderedDict)  # by serial
    _promised: int = 0  # states that sequences keep for blocks to come

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, prompt: list[int], adapter: str = "") -> int:
        """Number of leading tokens of ``prompt`` that are cached; fewer than all, so that the last one gives logits."""
        return PROMPT_BLOCK * len(self._usable(self._walk(prompt, (len(prompt) - 1) // PROMPT_BLOCK, adapter)))

    def _usable(self, path: list[PrefixBlock]) -> list[PrefixBlock]:
        """The blocks of ``path`` up to the last one that a prompt can go on from."""
        if self.states is None:
            return path
        while path and path[-1].states is None:
            path = path[:-1]
        return path

    def promise_states(self, kv: SequenceKV, prompt: list[int], cached: int, adapter: str = "") -> None:
        """Have ``kv`` keep the states that later prompts may go on from, as many as there is room for.

        Args:
            kv: Of a sequence that begins.
            prompt: Its prompt.
            cached: Tokens of it that came from the cache.
            adapter: The adapter that computes it.
        """
        if self.states is None or not self.enabled:
            return
        last = (len(prompt) - 1) // PROMPT_BLOCK
        parting = len(self._walk(prompt, last, adapter))  # where others went on in another way
        ends = {PROMPT_BLOCK * blocks for blocks in (last, parting) if PROMPT_BLOCK * blocks > cached}
        kv.keep_at = frozenset(
            sorted(ends)[-max(0, self.states - self._promised) :] if self.states > self._promised else ()
        )
        self._promised += len(kv.keep_at)
        self._forget_states(self.states - self._promised)

    def break_promise(self, kv: SequenceKV) -> None:
        """Keep no states for blocks that ``kv`` has not brought."""
        self._promised -= len(kv.keep_at)
        kv.keep_at, kv.kept = frozenset(), {}

    def _keep_states(self, kv: SequenceKV, path: list[PrefixBlock]) -> None:
        for end, states in kv.kept.items():
            block = path[end // PROMPT_BLOCK - 1] if end <= PROMPT_BLOCK * len(path) else None
            if block is not None and block.states is None:
                block.states = states
                self._with_states[block.serial] = block
        self.break_promise(kv)
        if self.states is not None:
            self._forget_states(self.states - self._promised)

    def _forget_states(self, most: int) -> None:
        while len(self._with_states) > most:
            _, block = self._with_states.popitem(last=False)
            block.states = None

    def copy_into(self, kv: SequenceKV, prompt: list[int], tokens: int, adapter: str = "") -> None:
        """Give ``kv`` the first ``tokens`` cached positions of ``prompt``."""
        path = self._walk(prompt, tokens // PROMPT_BLOCK, adapter)
        for index, block in enumerate(path):
            kv.put(index, block.content)
        if path and path[-1].states is not None:
            self._with_states.move_to_end(path[-1].serial)
            kv.states = {layer: state.copy() for layer, state in path[-1].states.items()}

    def insert(self, kv: SequenceKV, prompt: list[int], adapter: str = "") -> None:
        """Cache the whole blocks of a computed ``prompt``, as far as the pool has free positions.

        Blocks beyond them go to the files, as far as these accept them now.
        """
        if not self.enabled:
            return
        path = self._insert(kv, prompt, adapter)
        self._keep_states(kv, path)

    def _insert(self, kv: SequenceKV, prompt: list[int], adapter: str) -> list[PrefixBlock]:
        """Cache blocks; return those of the prompt that are cached now."""
        blocks = len(prompt) // PROMPT_BLOCK
        path = self._walk(prompt, blocks, adapter)
        files = self._files_of(prompt, blocks, adapter) if len(path) < blocks else []
        for index in range(len(path), blocks):
            if not self.pool.take(PROMPT_BLOCK):
                self._write_from(kv, files, index)
                return path
            try:
                block = PrefixBlock(_cut(kv, index), path[-1] if path else None)
            except BaseException:
                self.pool.give_back(PROMPT_BLOCK)
                raise
            self._keep(path, prompt, block, adapter)
            if self.files is not None and not self.files.has(files[index]):
                path[-1].unwritten = files[index]
                self._unwritten.append(path[-1])
        return path

    def _write_from(self, kv: SequenceKV, files: list[BlockFile], start: int) -> None:
        for index, file in enumerate(files[start:], start):
            if self.files is None or not self.files.accepts:
                return
            if not self.files.has(file):
                self.files.write(file, HostBlock.copy_of(_layers(_cut(kv, index))))

    def files_after(self, prompt: list[int], tokens: int, adapter: str = "") -> list[BlockFile]:
        """Files of ``prompt`` after its first ``tokens``, whether they exist or not."""
        last = (len(prompt) - 1) // PROMPT_BLOCK  # fewer than all, so that the last token gives logits
        return self._files_of(prompt, last, adapter)[tokens // PROMPT_BLOCK :]

    def _files_of(self, prompt: list[int], blocks: int, adapter: str) -> list[BlockFile]:
        """Files of the first ``blocks`` of ``prompt`` as an adapter computes it; none without files."""
        if not self.enabled or self.files is None:
            return []
        return self.files.of(prompt, blocks, self.adapters[adapter] if adapter else "")

    def restore(self, kv: SequenceKV, prompt: list[int], start: int, files: list[BlockFile], adapter: str = "") -> int:
        """Give ``kv`` the prompt blocks from ``start`` on out of ``files``, and keep them; return how many there were.

        Those that follow one that is missing or wrong are not read.
        """
        found: list[HostBlock] = []
        for index, file in enumerate(files, start):
            block = self.files.read(file) if self.files is not None else None
            if block is None:
                break
            block.put_into(kv, index)
            found.append(block)
        self.hits += PROMPT_BLOCK * len(found)
        path = self._walk(prompt, start + len(found), adapter)
        for index in range(len(path), start + len(found)):
            if len(path) < start or not self.pool.take(PROMPT_BLOCK):
                break
            # What was read is kept as it is: a copy of the sequence's would be a second one.
            content = kv.cut(index) if isinstance(kv, PagedKV) else found[index - start].layers
            self._keep(path, prompt, PrefixBlock(content, path[-1] if path else None), adapter)
        return len(found)

    def _keep(self, path: list[PrefixBlock], prompt: list[int], block: PrefixBlock, adapter: str = "") -> None:
        """Put a block behind those of ``path``, its beginning."""
        self._blocks[_key(block.parent, prompt, len(path), adapter)] = block
        path.append(block)
        if block.parent is not None:
            block.parent.children += 1

    def read_ahead(self, prompt: list[int], adapter: str = "") -> None:
        """Have the files of ``prompt`` read into memory, which will be wanted soon."""
        if self.files is not None:
            self.files.read_ahead(self.files_after(prompt, self.match(prompt, adapter), adapter))

    @property
    def unwritten(self) -> bool:
        """Whether blocks have yet to be given to the files."""
        return bool(self._unwritten)

    def write(self) -> None:
        """Give blocks to the files, as many as they accept now."""
        while self.files is not None and self._unwritten and self.files.accepts:
            block = self._unwritten.popleft()
            if block.unwritten is not None:
                self.files.write(block.unwritten, HostBlock.copy_of(_layers(block.content)))
                block.unwritten = None

    def close(self, *, lost: bool = False) -> None:
        """Write what has to be written, unless memory is ``lost``, and wait for it."""
        if self.files is not None:
            while self._unwritten and not lost:
                self.files.wait()
                self.write()
            self.files.close()

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

    def _walk(self, prompt: list[int], limit: int, adapter: str = "") -> list[PrefixBlock]:
        """Cached blocks that ``prompt`` begins with, at most ``limit``; marks them as recently used."""
        path: list[PrefixBlock] = []
        while self.enabled and len(path) < limit:
            key = _key(path[-1] if path else None, prompt, len(path), adapter)
            block = self._blocks.get(key)
            if block is None:
                break
            self._blocks.move_to_end(key)
            path.append(block)
        return path

    def _drop(self, key: Key) -> None:
        block = self._blocks.pop(key)
        # Memory is wanted now: not even the list of unwritten blocks may hold it.
        block.content = block.unwritten = block.states = None
        self._with_states.pop(block.serial, None)
        if block.parent is not None:
            block.parent.children -= 1
        self.pool.give_back(PROMPT_BLOCK)


def _key(parent: PrefixBlock | None, prompt: list[int], index: int, adapter: str) -> Key:
    return (parent.serial if parent else adapter, tuple(prompt[index * PROMPT_BLOCK : (index + 1) * PROMPT_BLOCK]))


def _cut(kv: SequenceKV, index: int) -> object:
    return kv.cut(index)


def _layers(content: object) -> LayerKV:
    return content.layers() if isinstance(content, Page) else cast(LayerKV, content)
