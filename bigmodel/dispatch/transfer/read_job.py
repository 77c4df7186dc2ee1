"""Read jobs: a block on its way from disk to a device, with what is left to read and to copy, and its outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ...devices import Event
from .quantized_transfer import Transfer
from .read_plan import Chunk, ReadPlan
from .staging import StagingSlot

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""What to copy: (to, from) pairs."""


class ReadJob:
    """One fetch of a block, part or all of which is read from files.

    Args:
        transfer: What it is for.
        after: What must be done before its first copy.

    Attributes:
        block: Whose bytes are read.
        memory: The device memory that they are copied to.
        chunks: What is still to be read; None until it is its turn and its reads are planned.
        from_memory: Tensors that are copied from memory.
        left: How many copies are not queued yet.
        copied: Becomes the event of the last one.
        failure: What a copy raised.
    """

    def __init__(self, transfer: Transfer, after: Sequence[Event]) -> None:
        self.transfer = transfer
        self.block = transfer.block
        self.memory = transfer.into
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

    def settle(self, outcome: Event | BaseException) -> None:
        """Set the outcome, unless there is one already. Not to be called by several threads at once."""
        if self.copied.done():
            return
        if isinstance(outcome, BaseException):
            self.copied.set_exception(outcome)
        else:
            self.copied.set_result(outcome)

    def before(self) -> Sequence[Event]:
        """Return what the next copy must wait for; asked for each in turn, and only the first has to wait."""
        after, self._after = self._after, None
        return () if after is None else self.transfer.before(after)

    def open(self, reads: ReadPlan) -> None:
        """Take over how the block is read."""
        self.chunks, self.from_memory, self.left = deque(reads.chunks), reads.from_memory, 1 + len(reads.chunks)

    def copy_from_memory(self) -> None:
        """Copy the tensors that are not read from a file."""
        if len(self.from_memory) == len(self.block.tensors):
            self.block.fetch(self.memory)
            return
        views = self.block.layout.views(self.memory) if self.from_memory else []
        for index in self.from_memory:
            views[index].copy_(self.block.tensors[index].value.detach(), non_blocking=True)

    def copies(self, chunk: Chunk, staged: torch.Tensor) -> Copies:
        """Return what has to be copied of a staged chunk, and where it belongs in device memory."""
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
    """A chunk that is being staged.

    Attributes:
        chunk: Which.
        slot: Where.
        staged: Becomes its bytes.
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
    """One turn of the link for a job: what is copied from memory (`read` is None), or a chunk once it is staged."""

    job: ReadJob
    read: Read | None = None

    def copies(self) -> Copies:
        """Wait until the chunk is staged; return what has to be copied of it.

        Raises:
            Exception: Whatever reading raised.
        """
        return [] if self.read is None else self.job.copies(self.read.chunk, self.read.staged.result())

    def copy(self, copies: Copies) -> None:
        """Copy it to the device. Errors are stored and re-raised in whoever waits for the block; the staging slot is
        free all the same."""
        try:
            with torch.no_grad():
                if self.read is None:
                    self.job.copy_from_memory()
                else:
                    self.read.slot.check()
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
        except Exception as error:
            self.job.failure = error


class ReadEvent:
    """The event of a block's arrival: waiting for it waits for the disk, then for the last copy."""

    def __init__(self, job: ReadJob) -> None:
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
