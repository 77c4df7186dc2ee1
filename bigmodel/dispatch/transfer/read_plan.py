"""Which reads bring a block's bytes from its files: big, aligned, in file order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...checkpoint import is_untouched, mapped_region
from ...limits import FILE_ALIGNMENT
from ..weights.block import Block
from .files import SourceFile, SourceFiles

CHUNK_BYTES = 8 * 2**20
"""Bytes of one read: enough to run a disk and a link at their full speed, and a multiple of `FILE_ALIGNMENT`."""

GAP_BYTES = 64 * 2**10
"""Tensors this close to each other in a file are read as one: a second read would cost more than what lies between."""


@dataclass(frozen=True)
class Segment:
    """A run of bytes of one tensor within a chunk.

    Attributes:
        tensor: Which tensor of the block.
        start: First byte, counted from the tensor's beginning.
        offset: First byte, counted from the chunk's beginning.
        nbytes: How many.
    """

    tensor: int
    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Chunk:
    """One read.

    Attributes:
        file: What to read.
        offset: First byte in the file, a multiple of `FILE_ALIGNMENT`.
        needed: How many bytes hold the segments.
        address: Where the same bytes are mapped.
        segments: What is in it.
    """

    file: SourceFile
    offset: int
    needed: int
    address: int
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to ask for: those needed, rounded up to a multiple of `FILE_ALIGNMENT`."""
        return -(-self.needed // FILE_ALIGNMENT) * FILE_ALIGNMENT


@dataclass(frozen=True)
class ReadPlan:
    """How a block is read.

    Attributes:
        chunks: What to read from files.
        from_memory: Tensors to copy from memory instead: they lie in no file (any more), or were written to since.
        nbytes: Bytes of the tensors that are read.
    """

    chunks: tuple[Chunk, ...]
    from_memory: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class _Run:
    file: SourceFile
    offset: int
    nbytes: int
    tensor: int
    base: int
    """Where the file's byte 0 is mapped."""


def plan_reads(block: Block, files: SourceFiles, chunk_bytes: int) -> ReadPlan:
    """Return how `block` is read, given as few and as large reads as its tensors' places allow."""
    runs: list[_Run] = []
    from_memory: list[int] = []
    for index, tensor in enumerate(block.tensors):
        run = _run(index, tensor.value, files)
        if run is None:
            from_memory.append(index)
        else:
            runs.append(run)
    runs.sort(key=lambda run: (str(run.file.path), run.base, run.offset))
    return ReadPlan(tuple(_chunks(runs, chunk_bytes)), tuple(from_memory), sum(run.nbytes for run in runs))


def _run(index: int, value: torch.Tensor, files: SourceFiles) -> _Run | None:
    region = mapped_region(value)
    if region is None or not value.is_contiguous() or not is_untouched(value):
        return None
    file = files.get(region)
    if file is None:
        return None
    return _Run(file, region.offset, region.nbytes, index, value.data_ptr() - region.offset)


def _chunks(runs: list[_Run], chunk_bytes: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    builder: _ChunkBuilder | None = None
    for run in runs:
        position, end = run.offset, run.offset + run.nbytes
        while position < end:
            if builder is None or not builder.reaches(run, position):
                if builder is not None:
                    chunks.append(builder.chunk())
                builder = _ChunkBuilder(run, position, chunk_bytes)
            position = builder.add(run, position)
    if builder is not None:
        chunks.append(builder.chunk())
    return chunks


class _ChunkBuilder:
    """A chunk that is still growing."""

    def __init__(self, run: _Run, position: int, limit: int) -> None:
        self._first = run
        self._begin = position - position % FILE_ALIGNMENT
        self._end = position
        self._limit = limit
        self._pieces: list[Segment] = []

    def reaches(self, run: _Run, position: int) -> bool:
        """Whether what lies at `position` of the run's file can be part of this chunk."""
        same = run.file is self._first.file and run.base == self._first.base
        return same and position < self._begin + self._limit and position - self._end <= GAP_BYTES

    def add(self, run: _Run, position: int) -> int:
        """Take as much of `run`, from `position` on, as there is room for; return where it stopped."""
        stop = min(run.offset + run.nbytes, self._begin + self._limit)
        self._pieces.append(Segment(run.tensor, position - run.offset, position - self._begin, stop - position))
        self._end = max(self._end, stop)
        return stop

    def chunk(self) -> Chunk:
        first = self._first
        return Chunk(first.file, self._begin, self._end - self._begin, first.base + self._begin, tuple(self._pieces))
