"""From disk to an accelerator: reader threads, staging slots on the host, the copy stream, all at work at once.

    readers   fill staging slots with chunks of files, several at once, in the order in which blocks were asked for
    pump      hands each filled slot to the copy stream, in that order too
    stream    drains it into the device slab; then the staging slot is free for another chunk

So a block takes as long as the slowest of the three needs for its bytes, not as all of them one after another, and
reading goes on into the next block while the last one's bytes are still being copied.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial

from ..devices import Event
from .arrival import Arrival
from .chunks import CHUNK_BYTES, Chunk, plan_reads
from .disk_job import BlockRead, Copies, DiskJob, Stage
from .link import Link
from .page_cache import is_cached
from .read_policy import ReadPolicy
from .source_file import SourceFiles
from .staging_slots import StagingSlot, StagingSlots
from .stats import StreamStats

READERS = 2


class DiskReader:
    """Reads blocks from their files into device slabs.

    Its threads end when nobody holds it any more.

    Args:
        link: Over which staged bytes reach the device.
        policy: Whether reads go past the page cache.
        stats: Where bytes and seconds are counted.
        pin: Stage in pinned memory, from which a GPU copies at full speed beside the host.
        chunk_bytes: Bytes of one read and of one staging slot; a multiple of `ALIGNMENT`.
    """

    def __init__(
        self, link: Link, policy: ReadPolicy, stats: StreamStats, pin: bool = False, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._link = link
        self._policy = policy
        self._stats = stats
        self._pin = pin
        self._chunk_bytes = chunk_bytes
        self._files = SourceFiles()
        self._staging = StagingSlots(chunk_bytes, pin)
        self._lock = threading.Lock()
        self._jobs: deque[DiskJob] = deque()
        self._stages: deque[Stage] = deque()
        self._pumping = False
        self._pump_thread = ThreadPoolExecutor(1, thread_name_prefix="disk pump")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="disk reader")

    def fetch(self, arrival: Arrival, after: Sequence[Event]) -> Event:
        """Start bringing a block into its slot once the events `after` are done; return the event of its arrival."""
        job = DiskJob(arrival, after)
        with self._lock:
            for older in self._jobs:
                if older.arrival.slab is arrival.slab:
                    # It was a wrong guess: nobody waits for it any more.
                    older.settle(CancelledError())
            self._jobs.append(job)
            if not self._pumping:
                self._pump_thread.submit(self._pump)
                self._pumping = True
        return BlockRead(job)

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is under way."""
        with self._lock:
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
                self._staging, self._pumping = StagingSlots(self._chunk_bytes, self._pin), False
            raise

    def _fill(self) -> None:
        """Start the next reads, as many as there are free slots."""
        free = self._staging.free
        while free:
            job = self._current_job()
            if job is None:
                return
            assert job.chunks
            chunk, slot = job.chunks.popleft(), free.popleft()
            self._stages.append(Stage(job, slot, self._readers.submit(self._read, job, chunk, slot)))

    def _current_job(self) -> DiskJob | None:
        """Return the first job that is not read to its end, its reads planned."""
        while True:
            with self._lock:
                while self._jobs and self._jobs[0].is_read:
                    self._jobs.popleft()
                job = self._jobs[0] if self._jobs else None
            if job is None or job.chunks is not None:
                return job
            self._open(job)

    def _open(self, job: DiskJob) -> None:
        try:
            reads = plan_reads(job.block, self._files, self._chunk_bytes)
        except OSError as error:
            self._finish(job, error)
            return
        job.open(reads)
        in_memory = sum(job.block.tensors[index].value.nbytes for index in reads.from_memory)
        self._stats.add(from_disk=reads.nbytes, from_ram=in_memory)
        # Copies in the order of the jobs: the first waits for the slab, which others must not be held up by.
        self._stages.append(Stage(job))

    def _read(self, job: DiskJob, chunk: Chunk, slot: StagingSlot) -> Copies:
        """Stage a chunk; return what is to be copied then, so that the link does not wait for finding out."""
        slot.empty()
        cached = is_cached(chunk.address, chunk.needed)
        bypass = self._policy.bypasses(cached) and chunk.file.can_bypass
        with self._stats.reading():
            started = time.perf_counter()
            staged = slot.fill(chunk, bypass)
            seconds = time.perf_counter() - started
        if not cached:
            self._policy.record(bypass, chunk.needed, seconds)
        return job.copies(chunk, staged)

    def _drain(self, stage: Stage) -> None:
        """Queue the copy of what has been read, as soon as it has."""
        job, slot = stage.job, stage.slot
        try:
            copies = [] if stage.read is None else stage.read.result()
            if job.copied.done():  # it failed meanwhile
                return
            event = self._link.copy(partial(stage.copy, copies), job.before())
        except Exception as error:
            self._finish(job, error)
            return
        finally:
            if slot is not None:
                self._staging.free.append(slot)
        if slot is not None:
            slot.drained = event
        job.left -= 1
        if job.left == 0:
            self._finish(job, job.arrival.finish(event))

    def _finish(self, job: DiskJob, outcome: Event | Exception) -> None:
        with self._lock:
            job.settle(outcome)
