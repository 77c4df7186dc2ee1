"""Slots: fixed pieces of device memory that hold one block at a time, and the cache that assigns blocks to them.

`SlotCache` is the mechanism for streamed blocks and experts: the content of each slot, its users, and the events that
must pass before it is overwritten. Subclasses define the eviction policy: `BlockSlots` evicts the least recently used
block.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from ...devices import CopyStream, Event
from ...devices.nested import map_tensors, storage_of
from ..transfer.fetcher import Fetcher
from ..weights.block import Block
from ..weights.data_use import checksums
from ..weights.visits import VisitOrder
from .kept_views import MOST_MEMBERS, replace_kept

K = TypeVar("K", bound=Hashable)

EXPECTED = 3
"""Blocks on disk that are read ahead beyond those in slots, as far as staging memory holds them."""


@dataclass(eq=False)
class Slot(Generic[K]):
    """Device memory that holds one block at a time.

    Attributes:
        memory: The memory, uint8.
        content: The block in it, or being fetched into it.
        version: The content's version when its fetch began.
        ready: The event of the content's arrival.
        marks: Events that must pass before the content is overwritten.
        users: Number of forwards that compute with the content or wait for it.
    """

    memory: torch.Tensor
    content: K | None = None
    version: object = None
    ready: Event | None = None
    marks: list[Event] = field(default_factory=list)
    users: int = 0

    def mark(self, computation: Event) -> None:
        """Do not overwrite the content before `computation` has finished."""
        if self.marks or not computation.done():
            self.marks = [each for each in (*self.marks, computation) if not each.done()]


S = TypeVar("S", bound=Slot)  # type: ignore[type-arg]


class SlotCache(ABC, Generic[K, S]):
    """A fixed number of slots, all empty at first. Not thread-safe."""

    def __init__(self, slots: Sequence[S]) -> None:
        self.slots = list(slots)
        self._slot_of: dict[K, S] = {}

    @abstractmethod
    def is_used(self, slot: S) -> bool:
        """Whether a forward computes with the content of `slot` or waits for it."""

    def __contains__(self, content: K) -> bool:
        return content in self._slot_of

    def find(self, content: K, version: object) -> S | None:
        """Return the slot of `content`, arrived or being fetched; None if it has none, or if host tensors changed."""
        slot = self._slot_of.get(content)
        if slot is not None and slot.version != version and not self.is_used(slot):
            self.forget(slot)
            return None
        return slot

    def holds(self, content: K | None, slot: S) -> bool:
        """Whether `slot` is the slot of `content`."""
        return content is not None and self._slot_of.get(content) is slot

    def fill(self, slot: S, content: K, version: object, fetch: Callable[[torch.Tensor, list[Event]], Event]) -> None:
        """Start fetching `content` into `slot`.

        Args:
            slot: A slot that is not in use.
            content: Its new content.
            version: Version of the host's tensors, to detect later changes.
            fetch: Starts the copy into the given memory after the given events; returns the event of its arrival.
        """
        if slot.content is not None:
            self.forget(slot)
        slot.ready = fetch(slot.memory, slot.marks)
        # The marks stay until they have passed: the fetch may fail or be cancelled before its copies wait for them.
        slot.content, slot.version = content, version
        self._slot_of[content] = slot

    def forget(self, slot: S) -> None:
        """Mark `slot` as empty."""
        if slot.content is not None:
            self._slot_of.pop(slot.content, None)
        slot.content = None


@dataclass(eq=False)
class BlockSlot(Slot[Block]):
    """A slot for streamed blocks.

    Attributes:
        last_use: Time of the last use, as a counter.
        transient: Whether it serves one visit only.
        prefetched: Whether its content was fetched before it was requested.
        shown: Whether the model's parameters refer to its content.
        views: For each block that was here, its tensors as views of this memory.
        storage: Identifies its memory (see `storage_of`).
        memory_version: Version counter of its memory when its content was shown.
        checksums: Of the parameters of a block that uses ``.data``, taken when its content was shown.
    """

    last_use: int = 0
    transient: bool = False
    prefetched: bool = False
    shown: bool = False
    views: dict[Block, list[torch.Tensor]] = field(default_factory=dict)
    storage: int = field(init=False)
    memory_version: int = 0
    checksums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storage = storage_of(self.memory)

    def show(self, block: Block) -> None:
        """Make the model's parameters refer to the tensors of `block`, the content."""
        # A recomputation in another thread may have set them to leaves that receive gradients.
        if not self.shown:
            views = self.views.get(block)
            if views is None:
                views = self.views[block] = block.device_views(self.memory)
            block.copy_flags(views)
            self.shown = True
            self.memory_version = self.memory._version
            if block.uses_data:
                self.checksums = self._parameter_checksums(block)
            block.show(views)

    def show_host(self) -> None:
        """Make the model's parameters refer to the host tensors again, after copying what was written to the host.

        Raises:
            DispatchError: As for `Block.keep_state`; the parameters are reset nevertheless.
        """
        block = self.content
        if self.shown and block is not None:
            views = self.views[block]
            try:
                written = self.memory._version != self.memory_version
                if block.uses_data:
                    written = written or self._parameter_checksums(block) != self.checksums
                if block.keep_state(views, written):
                    # ``.data = ...`` and ``set_`` leave a parameter elsewhere.
                    del self.views[block]
            except Exception:
                self.views.pop(block, None)
                self.shown = False
                block.show_host()
                raise
            block.show_host()
            self.shown = False

    def _parameter_checksums(self, block: Block) -> list[int]:
        views = self.views[block]
        return checksums([view for tensor, view in zip(block.tensors, views) if not tensor.is_buffer])

    def compute(self, compute: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return ``compute(*args)``; the weights in it, and those that the computation keeps, are copied."""
        block, before = self.content, self._uses()
        output = self.copied_out(compute(*args))
        if block is not None:
            keeps = self._uses() > before
            if keeps or block.keeps_views is not False:
                # The first forwards are looked at anyway: references of another thread's may have ended meanwhile.
                self.copy_kept(block, args, None if keeps else MOST_MEMBERS)
        return output

    def copy_kept(self, block: Block, args: tuple[Any, ...], most: int | None = None) -> None:
        """Replace what a forward of `block` has kept of this slot's memory, in its arguments and its modules.

        Args:
            block: The block.
            args: The arguments of the forward.
            most: Members that are looked at; None: all.
        """
        hosts = {id(view): tensor.value for view, tensor in zip(self.views.get(block, ()), block.tensors)}

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            host = hosts.get(id(tensor))
            found: torch.Tensor = self.copied_out(tensor) if host is None else host
            return found

        own = {id(place.weights) for tensor in block.tensors for place in tensor.second_places}
        block.keeps_views = replace_kept((*args, *block.modules()), replaced, own, most) or bool(block.keeps_views)

    def _uses(self) -> int:
        """Return how many references there are to this slot's memory and to the tensors that view it."""
        views = self.views.get(self.content, ()) if self.content is not None else ()
        return int(torch._C._storage_Use_Count(self.storage)) + sum(map(sys.getrefcount, views))

    def copied_out(self, value: Any) -> Any:
        """Return `value` with every tensor in this slot's memory replaced by a copy.

        A module may return one of its weights or a view of it, as position embeddings do.
        """

        if isinstance(value, torch.Tensor):
            return value.clone() if storage_of(value) == self.storage else value
        return map_tensors(self.copied_out, value)


class BlockSlots(SlotCache[Block, BlockSlot]):
    """The slots of a streamer, and prefetching into them.

    Args:
        memory: Memory of each slot, uint8, large enough for any of the blocks.
        stream: The copy stream that writes to it.
        fetcher: Fetches blocks over that stream.
        order: The expected order of blocks.
        first: The block that a call of the model visits first.
    """

    def __init__(
        self,
        memory: Sequence[torch.Tensor],
        stream: CopyStream,
        fetcher: Fetcher,
        order: VisitOrder[Block],
        first: Block | None = None,
    ) -> None:
        for each in memory:
            fetcher.uses(each)
        # An asynchronous device may still use the previous contents of this memory.
        super().__init__([BlockSlot(each, marks=[stream.compute_mark()]) for each in memory])
        self._stream = stream
        self._fetcher = fetcher
        self._order = order
        self._first = first

    def is_used(self, slot: BlockSlot) -> bool:
        return slot.users > 0

    @property
    def in_use(self) -> int:
        """Number of blocks that forwards compute with or wait for."""
        return sum(slot.users > 0 for slot in list(self._slot_of.values()))

    def find_current(self, block: Block) -> BlockSlot | None:
        """Return the slot of `block` with the present values of its host tensors; None if there is none."""
        slot = self._slot_of.get(block)
        if slot is None or slot.users:
            return slot
        replaced, version = block.adopt_replaced()
        if replaced or slot.version != version:
            self.forget(slot)
            return None
        return slot

    def free(self) -> BlockSlot | None:
        """Return the slot to overwrite next; None if all are in use."""
        return least_wanted([slot for slot in self.slots if slot.users == 0])

    def transient(self, block: Block, device: torch.device) -> BlockSlot:
        """Return a new slot for one visit of `block`."""
        with torch.inference_mode(False):  # threads in other modes also write to it
            memory = torch.empty(block.layout.nbytes, dtype=torch.uint8, device=device)
        self._fetcher.uses(memory)
        return BlockSlot(memory, marks=[self._stream.compute_mark()], transient=True)

    def fetch(self, block: Block, slot: BlockSlot, ahead: bool = False) -> None:
        """Start fetching `block` into `slot`; `ahead` marks a prefetch."""
        _, version = block.adopt_replaced()
        self.fill(slot, block, version, lambda memory, after: self._fetcher.fetch(block, memory, after))
        slot.prefetched = ahead

    def prefetch(self, block: Block) -> None:
        """Start fetching the blocks expected after `block`, into slots whose content is needed later."""
        wanted = {block}
        for successor in self._order.after(block, len(self.slots) - 1):
            wanted.add(successor)
            if successor in self._slot_of:
                continue
            if successor.unwatched and successor is self._first:  # of the model's next call
                return
            free = least_wanted([slot for slot in self.slots if slot.users == 0 and slot.content not in wanted])
            if free is None:
                return
            try:
                self.fetch(successor, free, ahead=True)
            except Exception:
                # The forward that needs the block will fetch it again and raise the error.
                return

    def beyond(self, block: Block) -> list[Block]:
        """Return the blocks after `block` that will be fetched next, when slots become free."""
        following = self._order.after(block, len(self.slots) + EXPECTED)
        return [successor for successor in following if successor not in self._slot_of][:EXPECTED]

    def show_host(self) -> None:
        """Make the model's parameters refer to the host tensors of all blocks."""
        for block, slot in list(self._slot_of.items()):
            if slot.shown:
                block.show_host()


def least_wanted(slots: Sequence[BlockSlot]) -> BlockSlot | None:
    """Return the slot to overwrite: an empty one, else the least recently used; None if there are no slots."""
    if len(slots) <= 1:
        return slots[0] if slots else None
    return min(slots, key=lambda slot: (slot.content is not None, slot.last_use))
