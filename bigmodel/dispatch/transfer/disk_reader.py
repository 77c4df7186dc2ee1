"""Pipeline from disk to an accelerator: reader threads, staging slots on the host, and the copy stream.

    readers   fill staging slots with chunks of files, several at once, in the order of requests
    pump      submits filled slots to the copy stream, in the same order; those that wait together, in one submission
    stream    copies it to device memory; then the staging slot is free for another chunk

The stages overlap, so a block takes as long as the slowest of them. Reading continues with the next block while the
previous one is still being copied, even if the next block must wait for its slot on the device.

Each step of these threads takes the interpreter's lock, for which the thread that launches compute waits: chunks are
large, and what can be done for several at once is.
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
from ...plan import StagingMemory
from ..weights.block import Block
from ..weights.visits import StreamStats
from .files import SourceFiles
from .page_cache import ReadMode, ReadPolicy, seems_cached
from .quantized_transfer import Transfer
from .read_job import Read, ReadEvent, ReadJob, Stage, copy_staged
from .read_plan import Chunk, ReadPlan, plan_reads
from .speculative_reads import SpeculativeReads
from .staging import StagingSlot, StagingSlots


class DiskReader:
    """Reads blocks from their files into device memory.

    Its threads end when it is garbage-collected.

    Args:
        link: Copy stream to the device.
        policy: Decides how reads use the page cache.
        stats: Counters of bytes and seconds.
        staging: Staging slots: their number, and their bytes, which one read fills.
        pin: Stage in pinned memory, from which a GPU copies asynchronously at full speed.
        readers: Number of reader threads.
    """

    def __init__(
        self,
        link: CopyStream,
        policy: ReadPolicy,
        stats: StreamStats,
        staging: StagingMemory,
        pin: bool = False,
        readers: int = READERS,
    ) -> None:
        self._link = link
        self._policy = policy
        self._stats = stats
        self._pin = pin
        self._planned = staging
        self._files = SourceFiles()
        self._staging = StagingSlots(staging, pin)
        self._lock = threading.Lock()
        self._jobs: deque[ReadJob] = deque()
        self._stages: deque[Stage] = deque()
        self._speculative = SpeculativeReads()
        self._pumping = False
        self._pump_thread = ThreadPoolExecutor(1, thread_name_prefix="disk pump")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="disk reader")

    def fetch(self, transfer: Transfer, after: Sequence[Event]) -> ReadEvent:
        """Start fetching a block into its slot after the events `after`; return the event of its arrival."""
        job = ReadJob(transfer, after)
        with self._lock:
            for older in self._jobs:
                if older.transfer.memory is transfer.memory:
                    # A prefetch whose slot is reused: no thread waits for it.
                    older.set_outcome(CancelledError())
            self._jobs.append(job)
            if not self._pumping:
                self._pump_thread.submit(self._pump)
                self._pumping = True
        return ReadEvent(job)

    def expect(self, blocks: Sequence[Block]) -> None:
        """Announce the blocks that will be fetched next; they are read ahead into free staging memory. If others are
        fetched instead, the time of those reads is lost."""
        self._speculative.expect(blocks)

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is running."""
        return self._pumping

    def _pump(self) -> None:
        """Start reads into all free staging slots and submit one copy after another, until no job is left."""
        try:
            while True:
                self._fill()
                if self._stages:
                    self._drain(self._next_stages())
                    continue
                with self._lock:
                    if not self._jobs:
                        self._pumping = False
                        return
        except BaseException as error:
            with self._lock:
                for job in (*self._jobs, *(stage.job for stage in self._stages)):
                    job.set_outcome(error)
                self._jobs.clear()
                self._stages.clear()
                self._speculative = SpeculativeReads()
                self._staging, self._pumping = StagingSlots(self._planned, self._pin), False
            raise

    def _fill(self) -> None:
        """Start as many reads as there are free staging slots, for requested blocks first."""
        # `_current_job` comes first: it may free the slots of useless speculative reads.
        while (job := self._current_job()) is not None and self._staging.free:
            assert job.chunks
            self._stages.append(Stage(job, self._begin(job.chunks.popleft())))
        try:
            while self._staging.free and self._speculative.next_read(self._plan, self._begin):
                pass
        except OSError:
            # The fetch that needs the block will raise the error.
            self._speculative.expect(())

    def _begin(self, chunk: Chunk) -> Read:
        slot = self._staging.free.popleft()
        return Read(chunk, slot, self._readers.submit(self._read, chunk, slot))

    def _plan(self, block: Block) -> ReadPlan:
        return plan_reads(block, self._files, self._planned.chunk_bytes)

    def _current_job(self) -> ReadJob | None:
        """Return the first job with reads left to start, after planning its reads."""
        while True:
            with self._lock:
                while self._jobs and self._jobs[0].is_read:
                    self._jobs.popleft()
                job = self._jobs[0] if self._jobs else None
            if job is None or job.chunks is not None:
                return job
            self._open(job)

    def _open(self, job: ReadJob) -> None:
        """Plan the reads of a job, and adopt its speculative reads."""
        try:
            reads = self._plan(job.block)
        except OSError as error:
            self._finish(job, error)
            return
        job.open(reads)
        in_memory = sum(job.block.tensors[index].value.nbytes for index in reads.from_memory)
        self._stats.add(from_disk=reads.nbytes, from_ram=in_memory)
        # Copies are queued in the order of jobs; the first copy of each waits until its device slot is free.
        if job.has_own_stage:
            self._stages.append(Stage(job))
        begun = self._speculative.take(job.block, reads)
        if reads.chunks and not begun:
            self._drop_speculative()
        assert job.chunks is not None
        for read in begun:
            job.chunks.popleft()
            self._stages.append(Stage(job, read))

    def _drop_speculative(self) -> None:
        """Free the staging slots of useless speculative reads."""
        reads = self._speculative.drop()
        wait([read.staged for read in reads if not read.staged.cancel()])
        self._staging.free.extend(read.slot for read in reads)

    def _read(self, chunk: Chunk, slot: StagingSlot) -> torch.Tensor:
        """Stage a chunk and return its bytes."""
        slot.empty()
        cached = seems_cached(chunk.address, chunk.needed)
        mode = self._policy.mode(cached, chunk.offset)
        if mode is ReadMode.DIRECT and not chunk.file.can_bypass:
            mode = ReadMode.PASS
        with self._stats.reading():
            started = time.perf_counter()
            staged = slot.fill(chunk, mode)
            seconds = time.perf_counter() - started
        if not cached:
            self._policy.record(mode is ReadMode.DIRECT, chunk.needed, seconds)
        return staged

    def _next_stages(self) -> list[Stage]:
        """Wait until the next chunk is staged; return its stage and those of its job after it that are staged, too."""
        first = self._stages.popleft()
        first.wait()
        found = [first]
        while self._stages and self._stages[0].job is first.job and self._stages[0].is_staged:
            found.append(self._stages.popleft())
        return found

    def _drain(self, stages: Sequence[Stage]) -> None:
        """Submit the copies of staged chunks of one job."""
        job = stages[0].job
        slots = [stage.read.slot for stage in stages if stage.read is not None]
        try:
            copies = [copy for stage in stages for copy in stage.copies()]
            if job.copied.done():  # the job has failed
                return
            event = self._link.submit(partial(copy_staged, stages, copies), job.before())
            for slot in slots:
                slot.drained = event
        except Exception as error:
            self._finish(job, error)
            return
        finally:
            self._staging.free.extend(slots)
        job.left -= len(stages)
        if job.left == 0:
            self._finish(job, job.transfer.finish(event))

    def _finish(self, job: ReadJob, outcome: Event | Exception) -> None:
        with self._lock:
            job.set_outcome(outcome)
