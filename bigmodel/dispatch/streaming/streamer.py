"""The streamer: copies blocks to a device through slots, and prefetches the next ones.

    enter:  find the block in a slot, or fetch it into a free one; start prefetching the next blocks; wait for the
            block's arrival; make the module's parameters refer to the slot
    leave:  make the parameters refer to the host tensors again; the content stays until the slot is reused

The order of blocks is learned. A wrong prediction costs the time of one fetch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from ...devices import CopyStream, copy_stream
from ...limits import DEFAULT_SLOTS, GRADIENT_BYTES, READERS, STAGING_BYTES
from ..transfer.fetcher import Fetcher
from ..weights.block import Block
from ..weights.layout import largest
from ..weights.visits import StreamStats, Visited, VisitOrder
from .slots import BlockSlot, BlockSlots
from .transform_budgets import TransformBudgets

T = TypeVar("T")


class _ThreadHolds(threading.local):
    """Number of blocks that the calling thread holds."""

    count: int = 0


class Streamer(Visited[Block, BlockSlot]):
    """Streams blocks to one device through a fixed number of slots. A visit holds the slot of its block.

    Args:
        device: Execution device.
        blocks: The blocks that share the slots. A block that encloses others gets a transient slot while it runs, and
            is not listed here.
        slots: Blocks that may be on the device at once; at least one.
        staging_bytes: Limit of the host memory through which blocks on disk reach the device.
        readers: Number of threads that read them.
        gradient_bytes: Pinned memory through which gradients of a block reach the host.
    """

    def __init__(
        self,
        device: torch.device,
        blocks: list[Block],
        slots: int = DEFAULT_SLOTS,
        staging_bytes: int = STAGING_BYTES,
        readers: int = READERS,
        gradient_bytes: int = GRADIENT_BYTES,
    ) -> None:
        self.device = device
        self.gradient_bytes = gradient_bytes
        self.transform_budgets: TransformBudgets | None = None
        """Holds transformed calls to the budgets of devices; None: there are none."""
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
        self._holds = _ThreadHolds()
        self.stats = StreamStats()
        self._stream: CopyStream = copy_stream(self.device)
        self._fetcher = Fetcher(self._stream, self.device, self.stats, self.blocks, *self._reading)
        self._slots = BlockSlots(self._memory, self._stream, self._fetcher, self._order, next(iter(self.blocks), None))

    def _forked(self) -> None:
        super()._forked()
        # Parameters of blocks in use by other threads refer to the device, and those threads do not exist in the child.
        self._slots.show_host()

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory of the slots, and of the staging buffers for quantised blocks."""
        return sum(memory.nbytes for memory in self._memory) + self._fetcher.staging_bytes

    @property
    def in_use(self) -> int:
        """Number of blocks that forwards of this process compute with now."""
        return self._slots.in_use if self.is_started else 0

    def adopt_replaced(self, block: Block) -> None:
        """Adopt tensors by which the user has replaced host tensors, unless a forward is using the block."""
        if not self.is_started:
            self.start()
        with self._lock:
            if self._slots.find_current(block) is None:
                block.adopt_replaced()

    def run(self, block: Block, compute: Callable[..., T], *args: Any) -> T:
        """Return ``compute(*args)``, computed while `block` is on the device; weights in the output, in arguments
        and in attributes of the block's modules are copied.

        Raises:
            Exception: The error of the fetch or of `compute`; the slot is released.
        """
        return self.visit(block, lambda held: held[0].compute(compute, args))

    def _enter(self, block: Block, held: list[BlockSlot]) -> None:
        """Fetch `block` if needed, and make the model's parameters refer to it."""
        slot = self._take(block, held)
        prefetched = slot.prefetched
        try:
            self._await(block, slot)
        except Exception:
            if not prefetched:
                raise
            # The prefetch failed; a new fetch may succeed.
            self._leave(held)
            self._await(block, self._take(block, held))

    def _take(self, block: Block, held: list[BlockSlot]) -> BlockSlot:
        """Return the slot of `block`, marked as in use, and start prefetching the next blocks."""
        with self._lock:
            slot = self._find_or_fetch(block)
            slot.users += 1
            self._holds.count += 1
            held.append(slot)
            self._clock += 1
            slot.last_use = self._clock
            alone = self._order.visit(block)
            self._slots.prefetch(block)
            if self._fetcher.reads_files:
                # With several threads the next block is unpredictable.
                self._fetcher.expect(self._slots.beyond(block) if alone else ())
        return slot

    def _find_or_fetch(self, block: Block) -> BlockSlot:
        """Return the slot of `block`; if it has none, wait for a free slot and start its fetch."""
        while True:
            slot = self._slots.find_current(block)
            if slot is not None:
                self.stats.hits += 1
                return slot
            free = self._free_slot_for(block)
            if free is not None:
                self.stats.misses += 1
                self._slots.fetch(block, free)
                return free
            # Another thread may fetch the same block meanwhile, so it is looked up again.
            self._waiting += 1
            try:
                self._changed.wait()
            finally:
                self._waiting -= 1

    def _free_slot_for(self, block: Block) -> BlockSlot | None:
        """Return a slot to fetch `block` into; None if one must be waited for."""
        free = None if block.encloses else self._slots.free()
        # A thread that holds a slot must not wait for another: two such threads would deadlock.
        if free is None and (block.encloses or self._holds.count):
            return self._slots.transient(block, self.device)
        return free

    def _await(self, block: Block, slot: BlockSlot) -> None:
        """Wait for `block`'s arrival in `slot`, and make the model's parameters refer to it."""
        ready = slot.ready
        assert ready is not None
        started = time.perf_counter()
        try:
            ready.wait()
        except BaseException:
            with self._lock:
                # After an interrupted wait the fetch may still be running; then the slot's content is valid later.
                if self._slots.holds(block, slot) and ready.done():
                    self._slots.forget(slot)
            raise
        waited = time.perf_counter() - started
        with self._lock:
            self.stats.seconds_waited += waited
            slot.show(block)

    def _leave(self, held: list[BlockSlot]) -> None:
        """Release the slot: its last user resets the model's parameters to the host tensors. It is not overwritten
        before the launched compute has finished."""
        with self._lock:
            if held:
                slot = held[0]
                slot.mark(self._stream.compute_mark())
                if slot.users == 1:
                    slot.show_host()
                    if slot.transient or (slot.content is not None and slot.content.unwatched):
                        self._slots.forget(slot)
                slot.users -= 1
                self._holds.count -= 1
                del held[:]
            if self._waiting:
                self._changed.notify_all()


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is running.

    A block can be neither streamed nor recomputed under these. Its module then computes with the offloaded weights,
    which are copied to the device in each operation.
    """
    return maybe_current_level() is not None or forward_ad._current_level >= 0
