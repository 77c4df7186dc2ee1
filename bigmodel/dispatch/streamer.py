"""The mechanism that makes streamed blocks visit a device: slots, fetches, prefetch.

    acquire(block):  find the block in a slot, or take a free slot and fetch it; start fetching what comes next;
                     wait for the block's own fetch; show its weights to the module
    release(block):  show the host weights again; the slot keeps its content until somebody needs the room

Which block comes next is learned: each thread remembers which block it acquired after which; the first time through
it is taken to be the order in which they were given. A wrong guess, as after a skipped or repeated block, costs the
time of one fetch and nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..devices import CopyStream, copy_stream
from .block import Block
from .fetch import Fetcher
from .slab import largest
from .slot import Slot, least_wanted
from .stats import StreamStats

T = TypeVar("T")

EXPECTED = 3
"""How many blocks on disk are read ahead of those that have slots, as far as staging memory holds them."""


class _Thread(threading.local):
    """What the calling thread has acquired: the last block, and how many it holds now."""

    last: Block | None = None
    holds: int = 0


class Streamer:
    """Streams blocks to one device through a fixed number of slots.

    Args:
        device: Where the blocks run.
        blocks: The blocks that take turns in the slots. Blocks that enclose others get room of their own while
            they run, and need not be named here.
        slots: How many blocks may be on the device at once; at least one.
    """

    def __init__(self, device: torch.device, blocks: list[Block], slots: int = 2) -> None:
        self.device = device
        self.blocks = blocks
        nbytes = largest([block.layout for block in blocks])
        count = min(max(1, slots), len(blocks))
        self._slots = [Slot(torch.empty(nbytes, dtype=torch.uint8, device=device)) for _ in range(count)]
        self._slot_of: dict[Block, Slot] = {}
        # Until an order is learned, that in which the blocks were given is the best guess.
        self._next: dict[Block, Block] = dict(zip(blocks, [*blocks[1:], *blocks[:1]]))
        self._thread = _Thread()
        self._last: Block | None = None
        self._clock = 0
        self._start()

    def _start(self) -> None:
        """Make what belongs to one process: threads, their locks, and what they are in the middle of."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self.stats = StreamStats()
        self._stream: CopyStream = copy_stream(self.device)
        self._fetcher = Fetcher(self._stream, self.device, self.stats, self.blocks)

    def _start_in_child(self) -> None:
        """Begin anew after a fork: nothing that was on its way will arrive, and its threads are not here."""
        self._start()
        self._slot_of.clear()
        for slot in self._slots:
            if slot.content is not None and slot.users:
                slot.content.show_host()
            slot.content, slot.ready, slot.users, slot.shown, slot.marks = None, None, 0, False, []

    @property
    def slot_bytes(self) -> int:
        """Bytes of device memory that the slots take, and what is staged on the way to them."""
        return sum(slot.slab.nbytes for slot in self._slots) + self._fetcher.staging_bytes

    @property
    def in_use(self) -> int:
        """Slots whose content forwards run on now."""
        return sum(slot.users > 0 for slot in self._slots)

    @contextmanager
    def use(self, block: Block) -> Iterator[None]:
        """Within this context `block`'s weights are on the device."""
        slot = self.acquire(block)
        try:
            yield
        finally:
            self.release(slot)

    def acquire(self, block: Block) -> Slot:
        """Bring `block` to the device and show its weights there; return the slot to release later.

        Raises:
            Exception: Whatever the fetch raised; nothing is held then.
        """
        held: list[Slot] = []
        try:
            self._acquire(block, held)
        except BaseException:
            self._release(held)
            raise
        return held[0]

    def release(self, slot: Slot) -> None:
        """Give a slot back; the last to do so shows the host weights again."""
        self._release([slot])

    def visit(self, block: Block, compute: Callable[..., T], *args: Any) -> T:
        """Return what ``compute(*args)`` returns while `block`'s weights are on the device.

        Ctrl-C may fall between any two steps of this: the slot is given back all the same.
        """
        return self.visit_slot(block, lambda _: compute(*args))

    def visit_slot(self, block: Block, compute: Callable[[Slot], T]) -> T:
        """Do as `visit`; `compute` is called with the slot that holds the block."""
        held: list[Slot] = []
        try:
            self._acquire(block, held)
            return compute(held[0])
        finally:
            try:
                self._release(held)
            except KeyboardInterrupt:
                self._release(held)
                raise

    def _acquire(self, block: Block, held: list[Slot]) -> None:
        """Bring `block` to the device and show it. `held` gets its slot as soon as that is in use."""
        if self._process != os.getpid():
            self._start_in_child()
        slot = self._take(block, held)
        prefetched = slot.prefetched
        try:
            self._await(block, slot)
        except Exception:
            if not prefetched:
                raise
            # That happened before anybody needed the block. Whether it can be had now is what counts.
            self._release(held)
            self._await(block, self._take(block, held))

    def _take(self, block: Block, held: list[Slot]) -> Slot:
        """Return the slot that holds `block` or will, marked as in use, and start fetching what follows."""
        thread = self._thread
        with self._lock:
            slot = self._find_or_fetch(block)
            # An interrupt is noticed at calls alone: these three happen together or not at all.
            slot.users += 1
            thread.holds += 1
            held.append(slot)
            self._clock += 1
            slot.last_use = self._clock
            if thread.last is not None and thread.last is not block:
                self._next[thread.last] = block
            alone, self._last = self._last is thread.last, block
            thread.last = block
            self._prefetch(block)
            if self._fetcher.reads_files:
                # Where threads take turns nobody knows what comes next of all.
                self._fetcher.expect(self._beyond(block) if alone else ())
        return slot

    def _beyond(self, block: Block) -> list[Block]:
        """Return the blocks that will be fetched next when there is room for them."""
        found: list[Block] = []
        following = block
        for _ in range(len(self._slots) + EXPECTED):
            successor = self._next.get(following)
            if successor is None or successor is block or successor in found:
                break
            if successor not in self._slot_of:
                found.append(successor)
            following = successor
        return found[:EXPECTED]

    def _release(self, held: list[Slot]) -> None:
        """Give back the slot in `held` and empty it. If that is interrupted it can be done again."""
        with self._lock:
            if held:
                slot = held[0]
                marks = (*slot.marks, self._stream.compute_mark())
                slot.marks = [mark for mark in marks if not mark.done()]
                if slot.users == 1:
                    self._show_host(slot)
                slot.users -= 1
                self._thread.holds -= 1
                del held[:]
            if self._waiting:
                self._changed.notify_all()

    def _show_host(self, slot: Slot) -> None:
        block = slot.content
        if slot.shown and block is not None:
            if block.has_state:
                block.keep_state(slot.views[block])
            block.show_host()
            slot.shown = False
        if slot.transient:
            self._forget(slot)

    def _await(self, block: Block, slot: Slot) -> None:
        """Wait for `block`'s arrival in `slot` and show it there."""
        ready = slot.ready
        assert ready is not None
        started = time.perf_counter()
        try:
            ready.wait()
        except BaseException:
            with self._lock:
                # Unless the wait was interrupted and the fetch goes on: then its content is still to come.
                if self._slot_of.get(block) is slot and ready.done():
                    self._forget(slot)
            raise
        waited = time.perf_counter() - started
        with self._lock:
            self.stats.seconds_waited += waited
            views = slot.views.get(block) or self._make_views(block, slot)
            slot.shown = True
            block.show(views)

    def _make_views(self, block: Block, slot: Slot) -> list[torch.Tensor]:
        views = slot.views[block] = block.device_views(slot.slab)
        return views

    def _find_or_fetch(self, block: Block) -> Slot:
        """Return the slot that holds `block` or will; if there is none, one in which its fetch was started."""
        while True:
            slot = self._slot_of.get(block)
            if slot is not None and slot.users == 0 and self._is_stale(block, slot):
                self._forget(slot)
                slot = None
            if slot is not None:
                self.stats.hits += 1
                return slot
            free = self._free_slot(block)
            if free is not None:
                self.stats.misses += 1
                self._fetch(block, free)
                return free
            # While this thread waits another may fetch the same block: look for it again afterwards.
            self._waiting += 1
            try:
                self._changed.wait()
            finally:
                self._waiting -= 1

    def _is_stale(self, block: Block, slot: Slot) -> bool:
        """Whether the host weights were changed, by an optimizer say, since they were fetched into `slot`."""
        return block.adopt_replaced() or block.version() != slot.version

    def _free_slot(self, block: Block) -> Slot | None:
        """Return a slot whose content nobody uses, preferring what was wanted longest ago; None if all are in use."""
        if block.encloses:
            return self._transient(block)
        free = [slot for slot in self._slots if slot.users == 0]
        if free:
            return least_wanted(free)
        if self._thread.holds:
            # This thread may itself hold what others wait for: waiting for a slot could last for ever.
            return self._transient(block)
        return None

    def _transient(self, block: Block) -> Slot:
        """Return a slot of its own for one visit of `block`."""
        return Slot(torch.empty(block.layout.nbytes, dtype=torch.uint8, device=self.device), transient=True)

    def _fetch(self, block: Block, slot: Slot, ahead: bool = False) -> None:
        block.adopt_replaced()
        self._forget(slot)
        version = block.version()
        slot.ready = self._fetcher.fetch(block, slot.slab, slot.marks)
        slot.content, slot.version, slot.prefetched, slot.marks = block, version, ahead, []
        self._slot_of[block] = slot

    def _forget(self, slot: Slot) -> None:
        if slot.content is not None:
            self._slot_of.pop(slot.content, None)
        slot.content = None

    def _prefetch(self, block: Block) -> None:
        """Start fetching the blocks that follow, into slots whose content is wanted later than theirs."""
        wanted = {block}
        following = block
        for _ in range(len(self._slots) - 1):
            successor = self._next.get(following)
            if successor is None or successor in wanted:
                return
            wanted.add(successor)
            following = successor
            if successor in self._slot_of:
                continue
            free = [slot for slot in self._slots if slot.users == 0 and slot.content not in wanted]
            if not free:
                return
            try:
                self._fetch(successor, least_wanted(free), ahead=True)
            except Exception:
                # Nobody needs it yet. Who does fetches it, and is told what is wrong with it.
                return
