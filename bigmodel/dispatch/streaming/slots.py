"""Slots: device memory in which blocks take turns, and which of them holds what.

`SlotCache` is the mechanism, for streamed blocks and for experts: what lies in each slot, who uses it, what must end
before it is overwritten. Which slot is overwritten next is the policy of whoever derives from it: `BlockSlots` gives up
the block that was wanted longest ago.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ...devices import CopyStream, Event
from ...devices.nested import storage_of
from ..transfer.fetcher import Fetcher
from ..weights.block import Block
from ..weights.visits import VisitOrder

K = TypeVar("K", bound=Hashable)

EXPECTED = 3
"""How many blocks on disk are read ahead of those that have slots, as far as staging memory holds them."""


@dataclass(eq=False)
class Slot(Generic[K]):
    """Device memory that holds one block at a time.

    Attributes:
        memory: uint8.
        content: What lies in it, or is on its way there.
        version: The content's version when its fetch began.
        ready: The content's arrival.
        marks: Computations that must end before the content is overwritten.
        users: How many forwards compute with the content now, or wait for it.
    """

    memory: torch.Tensor
    content: K | None = None
    version: object = None
    ready: Event | None = None
    marks: list[Event] = field(default_factory=list)
    users: int = 0

    def mark(self, computation: Event) -> None:
        """Have the content stay until `computation` has ended, too."""
        if self.marks or not computation.done():
            self.marks = [each for each in (*self.marks, computation) if not each.done()]


S = TypeVar("S", bound=Slot)  # type: ignore[type-arg]


class SlotCache(ABC, Generic[K, S]):
    """A fixed number of slots, all empty at first. Not to be used by several threads at once."""

    def __init__(self, slots: Sequence[S]) -> None:
        self.slots = list(slots)
        self._slot_of: dict[K, S] = {}

    @abstractmethod
    def is_used(self, slot: S) -> bool:
        """Whether a forward computes with what is in `slot`, or waits for it."""

    def __contains__(self, content: K) -> bool:
        return content in self._slot_of

    def find(self, content: K, version: object) -> S | None:
        """Return the slot that holds `content` or will; None if there is none, or the host's tensors have changed."""
        slot = self._slot_of.get(content)
        if slot is not None and slot.version != version and not self.is_used(slot):
            self.forget(slot)
            return None
        return slot

    def holds(self, content: K | None, slot: S) -> bool:
        """Whether `slot` is the one that holds `content` or will."""
        return content is not None and self._slot_of.get(content) is slot

    def fill(self, slot: S, content: K, version: object, fetch: Callable[[torch.Tensor, list[Event]], Event]) -> None:
        """Start bringing `content` into `slot`.

        Args:
            slot: Nobody uses it.
            content: What it will hold.
            version: What tells whether the host's tensors have changed since.
            fetch: Starts the copy into the given memory after the given events; returns the event of its arrival.
        """
        self.forget(slot)
        slot.ready = fetch(slot.memory, slot.marks)
        slot.content, slot.version, slot.marks = content, version, []
        self._slot_of[content] = slot

    def forget(self, slot: S) -> None:
        """Note that nothing lies in `slot`."""
        if slot.content is not None:
            self._slot_of.pop(slot.content, None)
        slot.content = None


@dataclass(eq=False)
class BlockSlot(Slot[Block]):
    """A slot for streamed blocks.

    Attributes:
        last_use: Orders slots by when they were last wanted.
        transient: It serves one visit only.
        prefetched: Its content was fetched before anybody asked for it.
        shown: The model refers to its content.
        views: For each block that was here, its tensors in this memory.
        storage: Tells its memory from other memory.
    """

    last_use: int = 0
    transient: bool = False
    prefetched: bool = False
    shown: bool = False
    views: dict[Block, list[torch.Tensor]] = field(default_factory=dict)
    storage: int = field(init=False)

    def __post_init__(self) -> None:
        self.storage = storage_of(self.memory)

    def show(self, block: Block) -> None:
        """Make the model refer to the tensors of `block`, the content, that lie here."""
        # Who came first may show the same weights as leaves that gradients flow to.
        if not self.shown:
            views = self.views.get(block)
            if views is None:
                views = self.views[block] = block.device_views(self.memory)
            self.shown = True
            block.show(views)

    def show_host(self) -> None:
        """Make the model refer to the host tensors of the content again, with the state that forwards have written.

        Raises:
            Exception: Whatever keeping the state raised; the host tensors are shown all the same.
        """
        block = self.content
        if self.shown and block is not None:
            try:
                block.keep_state()
            except Exception:
                self.shown = False
                block.show_host()
                raise
            block.show_host()
            self.shown = False


class BlockSlots(SlotCache[Block, BlockSlot]):
    """The slots of a streamer, and what is fetched into them ahead of its use.

    Args:
        memory: Of each slot: uint8, large enough for any block that takes turns in them.
        stream: The copy stream that writes to it.
        fetcher: Fetches blocks over that stream.
        order: Which block is expected after which.
    """

    def __init__(
        self, memory: Sequence[torch.Tensor], stream: CopyStream, fetcher: Fetcher, order: VisitOrder[Block]
    ) -> None:
        # A device that computes behind the host may not be done yet with what lay in this memory before.
        super().__init__([BlockSlot(each, marks=[stream.compute_mark()]) for each in memory])
        self._stream = stream
        self._fetcher = fetcher
        self._order = order

    def is_used(self, slot: BlockSlot) -> bool:
        return slot.users > 0

    @property
    def in_use(self) -> int:
        """How many blocks forwards run on now, or wait for."""
        return sum(slot.users > 0 for slot in list(self._slot_of.values()))

    def find_current(self, block: Block) -> BlockSlot | None:
        """Return the slot that holds `block` as its host tensors are now, or will; None if there is none."""
        slot = self._slot_of.get(block)
        if slot is None or slot.users:
            return slot
        if block.adopt_replaced():
            self.forget(slot)
            return None
        return self.find(block, block.version())

    def free(self) -> BlockSlot | None:
        """Return the slot to overwrite next; None if all are in use."""
        return least_wanted([slot for slot in self.slots if slot.users == 0])

    def transient(self, block: Block, device: torch.device) -> BlockSlot:
        """Return a slot of its own for one visit of `block`."""
        with torch.inference_mode(False):  # other threads write to it and use it, whatever mode they are in
            memory = torch.empty(block.layout.nbytes, dtype=torch.uint8, device=device)
        return BlockSlot(memory, marks=[self._stream.compute_mark()], transient=True)

    def fetch(self, block: Block, slot: BlockSlot, ahead: bool = False) -> None:
        """Start fetching `block` into `slot`, `ahead` of anybody's asking for it or not."""
        block.adopt_replaced()
        self.fill(slot, block, block.version(), lambda memory, after: self._fetcher.fetch(block, memory, after))
        slot.prefetched = ahead

    def prefetch(self, block: Block) -> None:
        """Start fetching the blocks that follow `block`, into slots whose content is wanted later than theirs."""
        wanted = {block}
        for successor in self._order.after(block, len(self.slots) - 1):
            wanted.add(successor)
            if successor in self._slot_of:
                continue
            free = least_wanted([slot for slot in self.slots if slot.users == 0 and slot.content not in wanted])
            if free is None:
                return
            try:
                self.fetch(successor, free, ahead=True)
            except Exception:
                # Nobody needs it yet. The forward that does will fetch it, and raise the error.
                return

    def beyond(self, block: Block) -> list[Block]:
        """Return the blocks after `block` that will be fetched next when there is room for them."""
        following = self._order.after(block, len(self.slots) + EXPECTED)
        return [successor for successor in following if successor not in self._slot_of][:EXPECTED]

    def show_host(self) -> None:
        """Make the model refer to the host tensors of every block that is shown on the device."""
        for block, slot in list(self._slot_of.items()):
            if slot.shown:
                block.show_host()


def least_wanted(slots: Sequence[BlockSlot]) -> BlockSlot | None:
    """Return the slot to overwrite: an empty one, else the one wanted longest ago; None if there are no slots."""
    if len(slots) <= 1:
        return slots[0] if slots else None
    return min(slots, key=lambda slot: (slot.content is not None, slot.last_use))
