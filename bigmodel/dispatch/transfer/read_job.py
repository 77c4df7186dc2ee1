"""Read jobs: the state of a block's fetch from disk to a device: reads and copies left, and its outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from ...devices import Event
from ..weights.outside_use import host_value
from .quantized_transfer import Transfer
from .read_plan import Chunk, ReadPlan
from .staging import StagingSlot

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Copies as pairs of target and source."""


class ReadJob:
    """One fetch of a block, part or all of which is read from files.

    Args:
        transfer: The transfer that it serves.
        after: Events that must pass before its first copy.

    Attributes:
        block: The block to read.
        memory: Target of the copies in device memory.
        chunks: Chunks whose reads have not begun; None until its reads are planned.
        from_memory: Indices of tensors that are copied from memory.
        has_own_stage: Whether it has a stage beside its chunks': of tensors from memory, or as the only one.
        left: Number of stages whose copies are not submitted yet.
        copied: Future of the event of the last copy.
        failure: The error of a copy, if any.
    """

    def __init__(self, transfer: Transfer, after: Sequence[Event]) -> None:
        self.transfer = transfer
        self.block = transfer.block
        self.memory = transfer.into
        self._after: Sequence[Event] | None = after
        self.chunks: deque[Chunk] | None = None
        self.from_memory: tuple[int, ...] = ()
        self.has_own_stage = False
        self.left = 0
        self.copied: Future[Event] = Future()
        self.failure: BaseException | None = None

    @property
    def is_read(self) -> bool:
        """Whether all its reads have begun, or it has failed."""
        return self.copied.done() or (self.chunks is not None and not self.chunks)

    def set_outcome(self, outcome: Event | BaseException) -> None:
        """Set the outcome, unless it is set already. Not thread-safe."""
        if self.copied.done():
            return
        if isinstance(outcome, BaseException):
            self.copied.set_exception(outcome)
        else:
            self.copied.set_result(outcome)

    def before(self) -> Sequence[Event]:
        """Return the events that the next copy must wait for: only the first copy has any."""
        after, self._after = self._after, None
        return () if after is None else self.transfer.before(after)

    def open(self, reads: ReadPlan) -> None:
        """Adopt the plan of its reads."""
        self.chunks, self.from_memory = deque(reads.chunks), reads.from_memory
        self.has_own_stage = bool(reads.from_memory) or not reads.chunks
        self.left = len(reads.chunks) + self.has_own_stage

    def copy_from_memory(self) -> None:
        """Copy the tensors that are not read from files."""
        if len(self.from_memory) == len(self.block.tensors):
            self.block.fetch(self.memory)
            return
        views = self.block.layout.views(self.memory) if self.from_memory else []
        for index in self.from_memory:
            views[index].copy_(host_value(self.block.tensors[index].value), non_blocking=True)

    def copies(self, chunk: Chunk, staged: torch.Tensor) -> Copies:
        """Return the copies from a staged chunk to device memory."""
        found = []
        for segment in chunk.segments:
            source = staged[segment.offset : segment.offset + segment.nbytes]
            tensor, place = self.block.tensors[segment.tensor], self.block.layout.places[segment.tensor]
            if place.dtype == tensor.value.dtype:
                begin = place.offset + segment.start
                found.append((self.memory[begin : begin + segment.nbytes], source))
            else:
                size = tensor.value.element_size()
                begin, end = segment.start // size, (segment.start + segment.nbytes) // size
                whole = self.memory[place.offset : place.offset + place.nbytes].view(place.dtype)
                found.append((whole[begin:end], source.view(tensor.value.dtype)))
        return found


@dataclass
class Read:
    """The read of one chunk.

    Attributes:
        chunk: The chunk.
        slot: The staging slot.
        staged: Future of its bytes.
    """

    chunk: Chunk
    slot: StagingSlot
    staged: Future[torch.Tensor]

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.staged.done() and (self.staged.cancelled() or self.staged.exception() is not None)


@dataclass
class Stage:
    """One submission to the link for a job: its tensors from memory (`read` is None), or one staged chunk."""

    job: ReadJob
    read: Read | None = None

    @property
    def is_staged(self) -> bool:
        """Whether its copies can be submitted, or its read has failed."""
        return self.read is None or self.read.staged.done()

    def wait(self) -> None:
        """Block the calling thread until it is staged."""
        if self.read is not None:
            wait([self.read.staged])

    def copies(self) -> Copies:
        """Return the copies of the staged chunk.

        Raises:
            Exception: The error of the read.
        """
        return [] if self.read is None else self.job.copies(self.read.chunk, self.read.staged.result())


def copy_staged(stages: Sequence[Stage], copies: Copies) -> None:
    """Run the copies of staged chunks of one job. Errors are stored and re-raised in the waiter of the block; the
    staging slots are freed in any case."""
    try:
        with torch.no_grad():
            for stage in stages:
                if stage.read is None:
                    stage.job.copy_from_memory()
                else:
                    stage.read.slot.check()
            for target, source in copies:
                target.copy_(source, non_blocking=True)
    except Exception as error:
        stages[0].job.failure = error


class ReadEvent:
    """The event of a block's arrival: a wait covers its reads, then the last copy."""

    def __init__(self, job: ReadJob) -> None:
        self._job = job

    def done(self) -> bool:
        copied = self._job.copied
        if self._job.failure is not None:
            return True  # what was copied before the failure may be under way, but the block never arrives
        return copied.done() and (copied.exception() is not None or copied.result().done())

    def wait(self) -> None:
        self._job.copied.result().wait()
        self._raise_failure()

    def synchronize(self) -> None:
        self._job.copied.result().synchronize()
        self._raise_failure()

    def queued(self) -> None:
        """Block the calling thread until all its copies are queued, or no more will be."""
        wait([self._job.copied])

    def _raise_failure(self) -> None:
        if self._job.failure is not None:
            raise self._job.failure
