"""From disk to an accelerator: reader threads, staging slots on the host, the copy stream, all at work at once.

    readers   fill staging slots with chunks of files, several at once, in the order in which blocks were asked for
    pump      hands each filled slot to the copy stream, in that order too
    stream    drains it into device memory; then the staging slot is free for another chunk

So a block takes as long as the slowest of the three needs for its bytes, not as all of them one after another, and
reading goes on into the next block while the last one's bytes are still being copied, also if that block has to wait
for its room on the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from functools import partial

import torch

from ...devices import CopyStream, Event
from ...limits import READERS
from ..weights.block import Block
from ..weights.stats import StreamStats
from .files import SourceFiles
from .page_cache import ReadPolicy, is_cached
from .quantized_transfer import Transfer
from .read_job import Read, ReadEvent, ReadJob, Stage
from .read_plan import CHUNK_BYTES, Chunk, ReadPlan, plan_reads
from .speculative_reads import SpeculativeReads
from .staging import StagingSlot, StagingSlots


class DiskReader:
    """Reads blocks from their files into device memory.

    Its threads end when nobody holds it any more.

    Args:
        link: Over which staged bytes reach the device.
        policy: Whether reads go past the page cache.
        stats: Where bytes and seconds are counted.
        pin: Stage in pinned memory, from which a GPU copies at full speed beside the host.
        chunk_bytes: Bytes of one read and of one staging slot; a multiple of `FILE_ALIGNMENT`.
        readers: How many threads read.
    """

    def __init__(
        self,
        link: CopyStream,
        policy: ReadPolicy,
        stats: StreamStats,
        pin: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        readers: int = READERS,
    ) -> None:
        self._link = link
        self._policy = policy
        self._stats = stats
        self._pin = pin
        self._chunk_bytes = chunk_bytes
        self._files = SourceFiles()
        self._staging = StagingSlots(chunk_bytes, pin)
        self._lock = threading.Lock()
        self._jobs: deque[ReadJob] = deque()
        self._stages: deque[Stage] = deque()
        self._speculative = SpeculativeReads()
        self._pumping = False
        self._pump_thread = ThreadPoolExecutor(1, thread_name_prefix="disk pump")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="disk reader")

    def fetch(self, transfer: Transfer, after: Sequence[Event]) -> Event:
        """Start bringing a block into its slot once the events `after` are done; return the event of its arrival."""
        job = ReadJob(transfer, after)
        with self._lock:
            for older in self._jobs:
                if older.transfer.memory is transfer.memory:
                    # It was a wrong guess: nobody waits for it any more.
                    older.settle(CancelledError())
            self._jobs.append(job)
            if not self._pumping:
                self._pump_thread.submit(self._pump)
                self._pumping = True
        return ReadEvent(job)

    def expect(self, blocks: Sequence[Block]) -> None:
        """Say which blocks will be fetched after those that are; they are read ahead into what staging memory is
        free. If others are fetched instead, that costs the time of those reads and nothing else."""
        self._speculative.expect(blocks)

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is under way."""
        return self._pumping

    def _pump(self) -> None:
        """Keep all staging slots busy and queue one copy after another, until no job is left."""
        try:
            while True:
                self._fill()
                if self._stages:
                    self._drain(self._stages.popleft())
                    continue
                with self._lock:
                    if not self._jobs:
                        self._pumping = False
                        return
        except BaseException as error:
            with self._lock:
                for job in (*self._jobs, *(stage.job for stage in self._stages)):
                    job.settle(error)
                self._jobs.clear()
                self._stages.clear()
                self._speculative = SpeculativeReads()
                self._staging, self._pumping = StagingSlots(self._chunk_bytes, self._pin), False
            raise

    def _fill(self) -> None:
        """Start the next reads, as many as there are free slots: for what was asked for first."""
        # The job first: what was read ahead in vain gives its slots back only then.
        while (job := self._current_job()) is not None and self._staging.free:
            assert job.chunks
            self._stages.append(Stage(job, self._begin(job.chunks.popleft())))
        try:
            while self._staging.free and self._speculative.next_read(self._plan, self._begin):
                pass
        except OSError:
            # Nobody needs it yet. Who does is told what is wrong.
            self._speculative.expect(())

    def _begin(self, chunk: Chunk) -> Read:
        slot = self._staging.free.popleft()
        return Read(chunk, slot, self._readers.submit(self._read, chunk, slot))

    def _plan(self, block: Block) -> ReadPlan:
        return plan_reads(block, self._files, self._chunk_bytes)

    def _current_job(self) -> ReadJob | None:
        """Return the first job that is not read to its end, its reads planned."""
        while True:
            with self._lock:
                while self._jobs and self._jobs[0].is_read:
                    self._jobs.popleft()
                job = self._jobs[0] if self._jobs else None
            if job is None or job.chunks is not None:
                return job
            self._open(job)

    def _open(self, job: ReadJob) -> None:
        """Find out how a job is read, and take over what was read of it ahead."""
        try:
            reads = self._plan(job.block)
        except OSError as error:
            self._finish(job, error)
            return
        job.open(reads)
        in_memory = sum(job.block.tensors[index].value.nbytes for index in reads.from_memory)
        self._stats.add(from_disk=reads.nbytes, from_ram=in_memory)
        # Copies in the order of the jobs: the first waits for the slot's memory, which others must not be held up by.
        self._stages.append(Stage(job))
        begun = self._speculative.asked(job.block, reads)
        if reads.chunks and not begun:
            self._drop_speculative()
        assert job.chunks is not None
        for read in begun:
            job.chunks.popleft()
            self._stages.append(Stage(job, read))

    def _drop_speculative(self) -> None:
        """Take back the slots of what was read ahead in vain."""
        reads = self._speculative.drop()
        wait([read.staged for read in reads if not read.staged.cancel()])
        self._staging.free.extend(read.slot for read in reads)

    def _read(self, chunk: Chunk, slot: StagingSlot) -> torch.Tensor:
        """Stage a chunk and return its bytes."""
        slot.empty()
        cached = is_cached(chunk.address, chunk.needed)
        bypass = self._policy.bypasses(cached) and chunk.file.can_bypass
        with self._stats.reading():
            started = time.perf_counter()
            staged = slot.fill(chunk, bypass)
            seconds = time.perf_counter() - started
        if not cached:
            self._policy.record(bypass, chunk.needed, seconds)
        return staged

    def _drain(self, stage: Stage) -> None:
        """Queue the copy of what has been read, as soon as it has."""
        job, read = stage.job, stage.read
        try:
            copies = stage.copies()
            if job.copied.done():  # it failed meanwhile
                return
            event = self._link.submit(partial(stage.copy, copies), job.before())
            if read is not None:
                read.slot.drained = event
        except Exception as error:
            self._finish(job, error)
            return
        finally:
            if read is not None:
                self._staging.free.append(read.slot)
        job.left -= 1
        if job.left == 0:
            self._finish(job, job.transfer.finish(event))

    def _finish(self, job: ReadJob, outcome: Event | Exception) -> None:
        with self._lock:
            job.settle(outcome)
