"""A slot: device memory in which streamed blocks take turns.

The slots of a streamer: which holds which block, which is overwritten next, what is fetched ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...devices import CopyStream, Event
from ...devices.storage import storage_of
from ..transfer.fetcher import Fetcher
from ..weights.block import Block
from ..weights.visit_order import VisitOrder


@dataclass(eq=False)
class Slot:
    """Device memory that holds one block at a time.

    `users` counts the forwards that run on its content now; `last_use` orders slots by when they were last wanted;
    `prefetched` tells that its content was fetched before anybody asked for it, `shown` that the model refers to it;
    `marks` are the computations that must end before the content may be overwritten; `storage` tells its memory from
    other memory.
    """

    slab: torch.Tensor
    transient: bool = False
    content: Block | None = None
    users: int = 0
    last_use: int = 0
    version: int = 0
    prefetched: bool = False
    shown: bool = False
    ready: Event | None = None
    marks: list[Event] = field(default_factory=list)
    views: dict[Block, list[torch.Tensor]] = field(default_factory=dict)
    storage: int = field(init=False)

    def __post_init__(self) -> None:
        self.storage = storage_of(self.slab)

    def show(self, block: Block) -> None:
        """Make the model refer to the tensors of `block`, the content, that lie here."""
        # Who came first may show the same weights as leaves that gradients flow to.
        if not self.shown:
            views = self.views.get(block)
            if views is None:
                views = self.views[block] = block.device_views(self.slab)
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


def least_wanted(slots: Sequence[Slot]) -> Slot:
    """Return the one to overwrite: an empty one, else the one that was wanted longest ago."""
    if len(slots) == 1:
        return slots[0]
    return min(slots, key=lambda slot: (slot.content is not None, slot.last_use))


EXPECTED = 3
"""How many blocks on disk are read ahead of those that have slots, as far as staging memory holds them."""


class BlockSlots:
    """A fixed number of slots, all empty at first. Not to be used by several threads at once.

    Args:
        device: Where they are.
        slabs: Their memory: uint8, each large enough for any block that takes turns in them.
        stream: The copy stream that writes to them.
        fetcher: What fetches blocks into them, over that stream.
        order: Which block is expected after which.
    """

    def __init__(
        self,
        device: torch.device,
        slabs: Sequence[torch.Tensor],
        stream: CopyStream,
        fetcher: Fetcher,
        order: VisitOrder[Block],
    ) -> None:
        self._device = device
        self._stream = stream
        self._slots = [self._empty(slab) for slab in slabs]
        self._slot_of: dict[Block, Slot] = {}
        self._fetcher = fetcher
        self._order = order

    @property
    def in_use(self) -> int:
        """How many blocks forwards run on now, or wait for."""
        return sum(slot.users > 0 for slot in list(self._slot_of.values()))

    def find(self, block: Block) -> Slot | None:
        """Return the slot that holds `block` or will; None if there is none, or its content is of no use any more."""
        slot = self._slot_of.get(block)
        if slot is not None and slot.users == 0 and _is_stale(block, slot):
            self.forget(slot)
            return None
        return slot

    def holds(self, block: Block, slot: Slot) -> bool:
        """Whether `slot` is the one that holds `block` or will."""
        return self._slot_of.get(block) is slot

    def free(self) -> Slot | None:
        """Return the slot to overwrite next; None if all are in use."""
        free = [slot for slot in self._slots if slot.users == 0]
        return least_wanted(free) if free else None

    def transient(self, block: Block) -> Slot:
        """Return a slot of its own for one visit of `block`."""
        with torch.inference_mode(False):  # other threads write to it and use it, whatever mode they are in
            slab = torch.empty(block.layout.nbytes, dtype=torch.uint8, device=self._device)
        return self._empty(slab, transient=True)

    def fetch(self, block: Block, slot: Slot, ahead: bool = False) -> None:
        """Start fetching `block` into `slot`, `ahead` of anybody's asking for it or not."""
        block.adopt_replaced()
        self.forget(slot)
        version = block.version()
        slot.ready = self._fetcher.fetch(block, slot.slab, slot.marks)
        slot.content, slot.version, slot.prefetched, slot.marks = block, version, ahead, []
        self._slot_of[block] = slot

    def forget(self, slot: Slot) -> None:
        """Note that nothing lies in `slot`."""
        if slot.content is not None:
            self._slot_of.pop(slot.content, None)
        slot.content = None

    def prefetch(self, block: Block) -> None:
        """Start fetching the blocks that follow `block`, into slots whose content is wanted later than theirs."""
        wanted = {block}
        for successor in self._order.after(block, len(self._slots) - 1):
            wanted.add(successor)
            if successor in self._slot_of:
                continue
            free = [slot for slot in self._slots if slot.users == 0 and slot.content not in wanted]
            if not free:
                return
            try:
                self.fetch(successor, least_wanted(free), ahead=True)
            except Exception:
                # Nobody needs it yet. Who does fetches it, and is told what is wrong with it.
                return

    def beyond(self, block: Block) -> list[Block]:
        """Return the blocks after `block` that will be fetched next when there is room for them."""
        following = self._order.after(block, len(self._slots) + EXPECTED)
        return [successor for successor in following if successor not in self._slot_of][:EXPECTED]

    def _empty(self, slab: torch.Tensor, transient: bool = False) -> Slot:
        # A device that computes behind the host may not be done yet with what lay in this memory before.
        return Slot(slab, transient, marks=[self._stream.compute_mark()])

    def show_host(self) -> None:
        """Make the model refer to the host tensors of every block that is shown on the device."""
        for block, slot in list(self._slot_of.items()):
            if slot.shown:
                block.show_host()


def _is_stale(block: Block, slot: Slot) -> bool:
    """Whether the host weights were changed, by an optimizer say, since they were fetched into `slot`."""
    return block.adopt_replaced() or block.version() != slot.version
