"""From disk to an accelerator: reader threads, staging memory on the host, the copy stream, all at work at once.

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
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ..devices import Event
from ..plan import STAGING_BYTES
from .arrival import Arrival
from .chunks import CHUNK_BYTES, Chunk, Reads, plan_reads
from .link import Link
from .page_cache import is_cached
from .source_file import ALIGNMENT, ReadPolicy, SourceFiles
from .stats import StreamStats

READERS = 2
SLOTS = STAGING_BYTES // CHUNK_BYTES
"""Staging slots: those being filled, those full, and those being drained."""


MIN_CHUNK_BYTES = 64 * 2**10
"""Bytes of one read for a model so small that its blocks are hardly larger."""


def chunk_of(staging_bytes: int) -> int:
    """Return the bytes of one read, such that all staging slots together take so many, if that is not too few."""
    share = staging_bytes // SLOTS
    return max(share - share % ALIGNMENT, MIN_CHUNK_BYTES)


class _StagingSlot:
    """Host memory for one chunk on its way; `drained` is the copy that must end before it is filled again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.window = memoryview(memory.numpy())  # type: ignore[arg-type]
        self.drained: Event | None = None


class _Job:
    """A block on its way to a slot.

    Attributes:
        block: Whose bytes are read.
        slab: The device memory that they are copied to.
        arrival: What this is for.
        chunks: What is still to be read; None until it is its turn and its reads are planned.
        left: How many copies are still to be queued.
        copied: Becomes the event of the last one.
        failure: What a copy raised.
    """

    def __init__(self, arrival: Arrival, after: Sequence[Event]) -> None:
        self.arrival = arrival
        self.block = arrival.block
        self.slab = arrival.into
        self._after: Sequence[Event] | None = after
        self.chunks: deque[Chunk] | None = None
        self.from_memory: tuple[int, ...] = ()
        self.left = 0
        self.copied: Future[Event] = Future()
        self.failure: BaseException | None = None

    @property
    def is_read(self) -> bool:
        """Whether nothing of it is left to be read: all reads have begun, or it has failed."""
        return self.copied.done() or (self.chunks is not None and not self.chunks)

    def before(self) -> Sequence[Event]:
        """Return what the next copy must wait for; asked for each in turn, and only the first has to wait."""
        after, self._after = self._after, None
        return () if after is None else self.arrival.before(after)

    def open(self, reads: Reads) -> None:
        """Take over how the block is read."""
        self.chunks, self.from_memory, self.left = deque(reads.chunks), reads.from_memory, 1 + len(reads.chunks)

    def copy_from_memory(self) -> None:
        """Copy the tensors that are not read from a file."""
        if len(self.from_memory) == len(self.block.tensors):
            self.block.fetch(self.slab)
            return
        views = self.block.layout.views(self.slab) if self.from_memory else []
        for index in self.from_memory:
            views[index].copy_(self.block.tensors[index].value.detach(), non_blocking=True)

    def copies(self, chunk: Chunk, staged: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what has to be copied from staging memory, and where it belongs in the slab: (to, from) pairs."""
        found = []
        for piece in chunk.pieces:
            source = staged[piece.offset : piece.offset + piece.nbytes]
            tensor, place = self.block.tensors[piece.tensor], self.block.layout.places[piece.tensor]
            if place.dtype == tensor.value.dtype:
                begin = place.offset + piece.start
                found.append((self.slab[begin : begin + piece.nbytes], source))
            else:
                size = tensor.value.element_size()
                begin, end = piece.start // size, (piece.start + piece.nbytes) // size
                whole = self.slab[place.offset : place.offset + place.nbytes].view(place.dtype)
                found.append((whole[begin:end], source.view(tensor.value.dtype)))
        return found


class BlockRead:
    """The event of a block's arrival: waiting for it waits for the disk, then for the last copy."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def done(self) -> bool:
        copied = self._job.copied
        return copied.done() and (copied.exception() is not None or copied.result().done())

    def wait(self) -> None:
        self._job.copied.result().wait()
        self._raise_failure()

    def synchronize(self) -> None:
        self._job.copied.result().synchronize()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._job.failure is not None:
            raise self._job.failure


@dataclass
class _Stage:
    """One copy of a job and what it needs first: a chunk read into a slot, or nothing (`chunk` None).

    `copies` is found while the chunk is being read, so that the link does not wait for it.
    """

    job: _Job
    chunk: Chunk | None = None
    slot: _StagingSlot | None = None
    read: Future[None] | None = None
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


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
        self._slots: list[_StagingSlot] = []
        self._free: deque[_StagingSlot] = deque()
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._stages: deque[_Stage] = deque()
        self._pumping = False
        self._pump_thread = ThreadPoolExecutor(1, thread_name_prefix="disk pump")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="disk reader")

    def fetch(self, arrival: Arrival, after: Sequence[Event]) -> Event:
        """Start bringing a block into its slot once the events `after` are done; return the event of its arrival."""
        job = _Job(arrival, after)
        with self._lock:
            for older in self._jobs:
                if older.arrival.slab is arrival.slab:
                    # It was a wrong guess: nobody waits for it any more.
                    _settle(older, CancelledError())
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
            if not self._slots:
                self._slots = _staging(SLOTS, self._chunk_bytes, self._pin)
                self._free = deque(self._slots)
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
                    _settle(job, error)
                self._jobs.clear()
                self._stages.clear()
                self._slots, self._pumping = [], False
            raise

    def _fill(self) -> None:
        """Start the next reads, as many as there are free slots."""
        while self._free:
            job = self._current_job()
            if job is None:
                return
            assert job.chunks
            chunk, slot = job.chunks.popleft(), self._free.popleft()
            stage = _Stage(job, chunk, slot)
            stage.read = self._readers.submit(self._read, stage)
            self._stages.append(stage)
            with torch.no_grad():
                stage.copies = job.copies(chunk, slot.memory)

    def _current_job(self) -> _Job | None:
        """Return the first job that is not read to its end, its reads planned."""
        while True:
            with self._lock:
                while self._jobs and self._jobs[0].is_read:
                    self._jobs.popleft()
                job = self._jobs[0] if self._jobs else None
            if job is None or job.chunks is not None:
                return job
            self._open(job)

    def _open(self, job: _Job) -> None:
        try:
            reads = plan_reads(job.block, self._files, self._chunk_bytes)
        except OSError as error:
            self._finish(job, error)
            return
        job.open(reads)
        in_memory = sum(job.block.tensors[index].value.nbytes for index in reads.from_memory)
        self._stats.add(from_disk=reads.nbytes, from_ram=in_memory)
        # Copies in the order of the jobs: the first waits for the slab, which others must not be held up by.
        self._stages.append(_Stage(job))

    def _read(self, stage: _Stage) -> None:
        chunk, slot = stage.chunk, stage.slot
        assert chunk is not None
        assert slot is not None
        if slot.drained is not None:
            slot.drained.synchronize()
        cached = is_cached(chunk.address, chunk.needed)
        bypass = self._policy.bypasses(cached) and chunk.file.can_bypass
        with self._stats.reading():
            started = time.perf_counter()
            chunk.file.read(slot.window[: chunk.nbytes], chunk.offset, chunk.needed, bypass)
            seconds = time.perf_counter() - started
        if not cached:
            self._policy.record(bypass, chunk.needed, seconds)

    def _drain(self, stage: _Stage) -> None:
        """Queue the copy of what has been read, as soon as it has."""
        job, slot = stage.job, stage.slot
        try:
            if stage.read is not None:
                stage.read.result()
            if job.copied.done():  # it failed meanwhile
                return
            event = self._link.copy(lambda: self._copy(stage), job.before())
        except Exception as error:
            self._finish(job, error)
            return
        finally:
            if slot is not None:
                self._free.append(slot)
        if slot is not None:
            slot.drained = event
        job.left -= 1
        if job.left == 0:
            self._finish(job, job.arrival.finish(event))

    def _finish(self, job: _Job, outcome: Event | Exception) -> None:
        with self._lock:
            _settle(job, outcome)

    def _copy(self, stage: _Stage) -> None:
        job = stage.job
        try:
            with torch.no_grad():
                if stage.chunk is None:
                    job.copy_from_memory()
                for target, source in stage.copies:
                    target.copy_(source, non_blocking=True)
        except Exception as error:
            # Whoever waits for the block raises it; the staging slot is free all the same.
            job.failure = error


def _settle(job: _Job, outcome: Event | BaseException) -> None:
    """Say how a job ended, unless that is said already; the lock is held."""
    if job.copied.done():
        return
    if isinstance(outcome, BaseException):
        job.copied.set_exception(outcome)
    else:
        job.copied.set_result(outcome)


def _staging(count: int, nbytes: int, pin: bool) -> list[_StagingSlot]:
    """Return `count` slots of `nbytes` each, aligned as reads past the page cache need it."""
    if pin:
        memory = torch.empty(count * nbytes, dtype=torch.uint8, pin_memory=True)
    else:
        memory = torch.empty(count * nbytes + ALIGNMENT, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % ALIGNMENT :]
    return [_StagingSlot(memory[index * nbytes : (index + 1) * nbytes]) for index in range(count)]
