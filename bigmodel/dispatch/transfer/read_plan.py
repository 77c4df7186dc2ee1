"""Plans the reads of a block from its files: large, aligned, in file order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...checkpoint import are_untouched, is_untouched, mapped_region
from ...limits import FILE_ALIGNMENT
from ..weights.block import Block
from .files import SourceFile, SourceFiles

GAP_BYTES = 64 * 2**10
"""Tensors with a gap of at most so many bytes in a file share a read: a second read would cost more than the gap."""


@dataclass(frozen=True)
class Segment:
    """A run of bytes of one tensor within a chunk.

    Attributes:
        tensor: Index of the tensor in the block.
        start: Offset in the tensor, in bytes.
        offset: Offset in the chunk, in bytes.
        nbytes: Length in bytes.
    """

    tensor: int
    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Chunk:
    """One read.

    Attributes:
        file: The file.
        offset: Offset in the file in bytes, a multiple of `FILE_ALIGNMENT`.
        needed: Bytes from the offset to the end of the last segment.
        address: Address at which the same bytes are mapped.
        segments: The segments of tensors in it.
    """

    file: SourceFile
    offset: int
    needed: int
    address: int
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to request: `needed`, rounded up to a multiple of `FILE_ALIGNMENT`."""
        return -(-self.needed // FILE_ALIGNMENT) * FILE_ALIGNMENT


@dataclass(frozen=True)
class ReadPlan:
    """The reads of a block.

    Attributes:
        chunks: Reads from files.
        from_memory: Indices of tensors to copy from memory instead: they are in no file, or were modified.
        nbytes: Bytes of the tensors that are read from files.
    """

    chunks: tuple[Chunk, ...]
    from_memory: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class _TensorRange:
    """The byte range of one tensor in its file."""

    file: SourceFile
    offset: int
    nbytes: int
    tensor: int
    base: int
    """Address at which the file's byte 0 is mapped."""


def plan_reads(block: Block, files: SourceFiles, chunk_bytes: int) -> ReadPlan:
    """Return the reads of `block`, of at most `chunk_bytes` each and as few as its tensors' offsets allow."""
    found = [_range_of(index, tensor.value, files) for index, tensor in enumerate(block.tensors)]
    ranges = [each for each in found if each is not None]
    if not are_untouched(block.tensors[each.tensor].value for each in ranges):
        ranges = [each for each in ranges if is_untouched(block.tensors[each.tensor].value)]
    from_memory = sorted(set(range(len(found))) - {each.tensor for each in ranges})
    ranges.sort(key=lambda each: (str(each.file.path), each.base, each.offset))
    return ReadPlan(tuple(_chunks(ranges, chunk_bytes)), tuple(from_memory), sum(each.nbytes for each in ranges))


def _range_of(index: int, value: torch.Tensor, files: SourceFiles) -> _TensorRange | None:
    region = mapped_region(value)
    if region is None or not value.is_contiguous():
        return None
    file = files.get(region)
    if file is None:
        return None
    return _TensorRange(file, region.offset, region.nbytes, index, value.data_ptr() - region.offset)


def _chunks(ranges: list[_TensorRange], chunk_bytes: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    builder: _ChunkBuilder | None = None
    for each in ranges:
        position, end = each.offset, each.offset + each.nbytes
        while position < end:
            if builder is None or not builder.reaches(each, position):
                if builder is not None:
                    chunks.append(builder.chunk())
                builder = _ChunkBuilder(each, position, chunk_bytes)
            position = builder.add(each, position)
    if builder is not None:
        chunks.append(builder.chunk())
    return chunks


class _ChunkBuilder:
    """Collects the segments of one chunk."""

    def __init__(self, first: _TensorRange, position: int, limit: int) -> None:
        self._first = first
        self._begin = position - position % FILE_ALIGNMENT
        self._end = position
        self._limit = limit
        self._segments: list[Segment] = []

    def reaches(self, tensor: _TensorRange, position: int) -> bool:
        """Whether the byte at `position` of the tensor's file can belong to this chunk."""
        same = tensor.file is self._first.file and tensor.base == self._first.base
        return same and position < self._begin + self._limit and position - self._end <= GAP_BYTES

    def add(self, tensor: _TensorRange, position: int) -> int:
        """Add the tensor's bytes from `position` on, up to the limit of the chunk; return the position after them."""
        stop = min(tensor.offset + tensor.nbytes, self._begin + self._limit)
        start = position - tensor.offset
        self._segments.append(Segment(tensor.tensor, start, position - self._begin, stop - position))
        self._end = max(self._end, stop)
        return stop

    def chunk(self) -> Chunk:
        first, nbytes = self._first, self._end - self._begin
        return Chunk(first.file, self._begin, nbytes, first.base + self._begin, tuple(self._segments))
