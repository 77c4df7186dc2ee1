"""Read-ahead for a model that computes on the host with weights on disk: blocks are paged in ahead of their use.

    enter:  wait until the block is in memory; reader threads then page in the blocks after it
    leave:  allow the block to be dropped, if the budget requires it

Weights are never copied: they are views of memory-mapped files, and page-in means having the kernel read their pages.
Several threads do so, in large steps; with one the disk would be idle whenever the model's compute takes its core. Once
all blocks are in memory, and until the kernel evicts a page, entering a block takes a few microseconds.

`residency` decides which blocks stay in memory if not all of them may.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ...limits import READ_AHEAD_BYTES, READERS
from ..weights.visits import StreamStats, Visited, VisitOrder
from .mapped_block import MappedBlock
from .page_in import PageWatch, page_in
from .residency import Residency


class ReadAhead(Visited[MappedBlock, MappedBlock]):
    """Pages in mapped blocks ahead of their use. A visit holds its block, unless all blocks are in memory.

    Weights may be written at any time, except while another thread is in the forward of a model under a budget.

    Args:
        blocks: The blocks, in the order expected at first; later the observed order is used.
        budget: Limit of the process's resident set in bytes. None: blocks are dropped only if memory cannot hold all.
        ahead: Bytes of the next block that are paged in while one is computed with.
        readers: Number of threads.
    """

    def __init__(
        self,
        blocks: Sequence[MappedBlock],
        budget: int | None = None,
        ahead: int = READ_AHEAD_BYTES,
        readers: int = READERS,
    ) -> None:
        self.blocks = list(blocks)
        self._budget = budget
        self._ahead = ahead
        self._readers = readers
        self._order = VisitOrder(self.blocks)
        self.start()

    def _forked(self) -> None:
        super()._forked()
        for block in self.blocks:  # other threads of the parent do not exist in the child
            block.forget()
            block.users = block.running = 0

    def _start(self) -> None:
        super()._start()
        self.stats = StreamStats()
        self._residency = Residency(self.blocks, self._budget, self.stats, self._ahead)
        self._pool = ThreadPoolExecutor(self._readers, thread_name_prefix="read ahead")
        self._working = 0
        self._inside = 0
        self._waited_for: list[MappedBlock] = []
        self._watch = PageWatch()

    def _enter(self, block: MappedBlock, held: list[MappedBlock]) -> None:
        """Page in `block` if it is not in memory.

        Raises:
            CheckpointFormatError: A file was truncated or cannot be read.
        """
        block.check_files()
        self._order.visit(block)
        if self._watch.all_ready and self._watch.seems_complete(block):
            self.stats.hits += 1
            return
        self._page_in(block, held)

    def _leave(self, held: list[MappedBlock]) -> None:
        """Allow the block to be dropped again.

        Blocks are dropped only while a forward is inside one, and under the lock: a write to weights after the last
        forward cannot race with a drop that found them unmodified.
        """
        if not held:
            return
        with self._lock:
            if held:
                block = held[0]
                block.users -= 1
                self._inside -= 1
                del held[:]

    def _page_in(self, block: MappedBlock, held: list[MappedBlock]) -> None:
        started = time.perf_counter()
        with self._lock:
            self._notice_loss(block)
            if block.failure is not None:
                block.forget()
            self._count(block)
            block.users += 1
            self._inside += 1
            held.append(block)
            self._waited_for = [*self._waited_for, block]
            try:
                self._residency.prepare(block)
                self._residency.order = [block, *self._order.after(block, len(self.blocks))]
                self._residency.measure()
                self._wake()
                while not block.is_ready:
                    if block.failure is not None:
                        raise block.failure
                    self._changed.wait()
            finally:
                self._waited_for.remove(block)
        self.stats.add(waited=time.perf_counter() - started)

    def _notice_loss(self, block: MappedBlock) -> None:
        """Page in all blocks again if pages were evicted. For those still in memory this takes little time."""
        if self._watch.has_lost(block):
            for other in self.blocks:
                if not other.running:
                    other.forget()

    def _count(self, block: MappedBlock) -> None:
        if block.is_ready or block.running or block.paged_in:
            self.stats.hits += 1
        else:
            self.stats.misses += 1

    def _wake(self) -> None:
        """Start all reader threads, unless all blocks are in memory."""
        if all(block.is_ready for block in self._residency.order):
            self._notice_ready()
            return
        while self._working < self._readers:
            self._pool.submit(self._work)
            self._working += 1

    def _work(self) -> None:
        try:
            self._page_in_steps()
        except BaseException as error:
            with self._lock:
                for block in self._waited_for:
                    block.failure = RuntimeError(f"paging in the weights of {block.name!r} failed: {error}")
                self._working -= 1
                self._changed.notify_all()
            raise

    def _page_in_steps(self) -> None:
        """Page in one step after another, until none is due."""
        while True:
            with self._lock:
                # Blocks may be dropped only while a forward is inside: see `_leave`.
                found = self._residency.next_step(self._waited_for, may_drop=self._inside > 0)
                if found is None:
                    self._notice_ready()
                    self._working -= 1
                    return
                block, step = found
                block.running += 1
                block.paged_in += step.nbytes
            failure = page_in(block, step, self.stats)
            with self._lock:
                block.running -= 1
                if failure is not None:
                    block.steps.clear()
                    block.failure = failure
                if block.is_ready or failure is not None:
                    self._changed.notify_all()

    def _notice_ready(self) -> None:
        if all(block.is_ready for block in self.blocks):
            self._watch.begin()
