"""The mechanism that makes streamed blocks visit a device: slots, fetches, prefetch.

    enter:  find the block in a slot, or take a free slot and fetch it; start fetching what comes next; wait for the
            block's own fetch; show its weights to the module
    leave:  show the host weights again; the slot keeps its content until somebody needs the room

Which block comes next is learned. A wrong guess costs the time of one fetch and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...devices import CopyStream, copy_stream
from ...devices.nested import copied_out_of
from ...limits import DEFAULT_SLOTS, READERS, STAGING_BYTES
from ..transfer.fetcher import Fetcher
from ..weights.block import Block
from ..weights.layout import largest
from ..weights.stats import StreamStats
from ..weights.visits import Visited, VisitOrder
from .slots import BlockSlot, BlockSlots

T = TypeVar("T")


class _Thread(threading.local):
    """How many blocks the calling thread holds."""

    holds: int = 0


class Streamer(Visited[Block, BlockSlot]):
    """Streams blocks to one device through a fixed number of slots. A visit holds the slot of its block.

    Args:
        device: Where the blocks run.
        blocks: The blocks that take turns in the slots. Blocks that enclose others get room of their own while
            they run, and need not be named here.
        slots: How many blocks may be on the device at once; at least one.
        staging_bytes: Host memory through which blocks on disk reach it, at most.
        readers: How many threads read them.
    """

    def __init__(
        self,
        device: torch.device,
        blocks: list[Block],
        slots: int = DEFAULT_SLOTS,
        staging_bytes: int = STAGING_BYTES,
        readers: int = READERS,
    ) -> None:
        self.device = device
        self.blocks = blocks
        nbytes = largest([block.layout for block in blocks])
        count = min(max(1, slots), len(blocks))
        self._memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._order = VisitOrder(blocks)
        self._clock = 0
        self._reading = staging_bytes, readers
        self.start()

    def _start(self) -> None:
        super()._start()
        self._waiting = 0
        self._thread = _Thread()
        self.stats = StreamStats()
        self._stream: CopyStream = copy_stream(self.device)
        self._fetcher = Fetcher(self._stream, self.device, self.stats, self.blocks, *self._reading)
        self._slots = BlockSlots(self._memory, self._stream, self._fetcher, self._order)

    def _forked(self) -> None:
        super()._forked()
        # What other threads were computing with lies on the device, and they are not here to show the host again.
        self._slots.show_host()

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory that the slots take, and what is staged on the way to them."""
        return sum(memory.nbytes for memory in self._memory) + self._fetcher.staging_bytes

    @property
    def in_use(self) -> int:
        """How many blocks forwards run on now, in whatever thread of this process."""
        return self._slots.in_use if self.is_started else 0

    def adopt_replaced(self, block: Block) -> None:
        """Take over what the user put in the place of host tensors, unless a forward shows the device's there now."""
        if not self.is_started:
            self.start()
        with self._lock:
            if self._slots.find_current(block) is None:
                block.adopt_replaced()

    def run(self, block: Block, compute: Callable[..., T], *args: Any) -> T:
        """Return what ``compute(*args)`` returns while `block`'s weights are on the device, weights in it copied.

        Raises:
            Exception: Whatever the fetch or `compute` raised; nothing is held then.
        """
        return self.visit(block, lambda held: copied_out_of(compute(*args), held[0].storage))

    def _enter(self, block: Block, held: list[BlockSlot]) -> None:
        """Bring `block` to the device and show it."""
        slot = self._take(block, held)
        prefetched = slot.prefetched
        try:
            self._await(block, slot)
        except Exception:
            if not prefetched:
                raise
            # That happened before anybody needed the block. Whether it can be had now is what counts.
            self._leave(held)
            self._await(block, self._take(block, held))

    def _take(self, block: Block, held: list[BlockSlot]) -> BlockSlot:
        """Return the slot that holds `block` or will, marked as in use, and start fetching what follows."""
        with self._lock:
            slot = self._find_or_fetch(block)
            slot.users += 1
            self._thread.holds += 1
            held.append(slot)
            self._clock += 1
            slot.last_use = self._clock
            alone = self._order.visit(block)
            self._slots.prefetch(block)
            if self._fetcher.reads_files:
                # Where threads take turns nobody knows what comes next of all.
                self._fetcher.expect(self._slots.beyond(block) if alone else ())
        return slot

    def _find_or_fetch(self, block: Block) -> BlockSlot:
        """Return the slot that holds `block` or will; if there is none, one in which its fetch was started."""
        while True:
            slot = self._slots.find_current(block)
            if slot is not None:
                self.stats.hits += 1
                return slot
            free = self._room_for(block)
            if free is not None:
                self.stats.misses += 1
                self._slots.fetch(block, free)
                return free
            # While this thread waits another may fetch the same block: look for it again afterwards.
            self._waiting += 1
            try:
                self._changed.wait()
            finally:
                self._waiting -= 1

    def _room_for(self, block: Block) -> BlockSlot | None:
        """Return a slot to fetch `block` into; None if one must be waited for."""
        free = None if block.encloses else self._slots.free()
        # A thread that holds a block may hold what others wait for: waiting for a slot could last for ever.
        if free is None and (block.encloses or self._thread.holds):
            return self._slots.transient(block, self.device)
        return free

    def _await(self, block: Block, slot: BlockSlot) -> None:
        """Wait for `block`'s arrival in `slot` and show it there."""
        ready = slot.ready
        assert ready is not None
        started = time.perf_counter()
        try:
            ready.wait()
        except BaseException:
            with self._lock:
                # Unless the wait was interrupted and the fetch goes on: then its content is still to come.
                if self._slots.holds(block, slot) and ready.done():
                    self._slots.forget(slot)
            raise
        waited = time.perf_counter() - started
        with self._lock:
            self.stats.seconds_waited += waited
            slot.show(block)

    def _leave(self, held: list[BlockSlot]) -> None:
        """Show the host's weights again; who computes with the slot's content must end before it is overwritten."""
        with self._lock:
            if held:
                slot = held[0]
                slot.mark(self._stream.compute_mark())
                if slot.users == 1:
                    slot.show_host()
                    if slot.transient:
                        self._slots.forget(slot)
                slot.users -= 1
                self._thread.holds -= 1
                del held[:]
            if self._waiting:
                self._changed.notify_all()
