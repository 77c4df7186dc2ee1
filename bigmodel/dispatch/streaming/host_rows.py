"""Rows of keys, or of values, of one layer on the host: a list of blocks that grows without moving anything.

A row is one token of all sequences, [sequences, heads, dim]. Rows of one block are contiguous: each block is one copy
over the link. Where RAM holds only so many, the oldest block is written to a file when a further one is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...plan.memory.host_kv import kv_blocks, rows_on_disk
from .kv_file import KVDisk, KVRange

Allocate = Callable[[int], torch.Tensor]
"""Bytes -> new host memory of as many, uint8."""


def _nothing() -> None:
    """Wait for nothing: rows are written by the caller at once."""


class HostRows:
    """Keys, or values, of one layer.

    Args:
        allocate: Returns host memory.
        planned: Rows that the plan counts: a block has no more.
        in_ram: Rows that RAM holds at most; 0: all.
        disk: Where the older ones are written.

    Attributes:
        length: Number of rows.
        on_disk: The first rows, which are in a file.
    """

    def __init__(self, allocate: Allocate, planned: int, in_ram: int = 0, disk: KVDisk | None = None) -> None:
        self.length = self.on_disk = 0
        self._allocate = allocate
        self._planned = planned
        self._in_ram = in_ram if disk is not None else 0
        self._disk = disk
        self._ranges: list[KVRange] = []
        self._blocks: list[torch.Tensor] = []
        self._shape: torch.Size | None = None
        self._dtype = torch.float32

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 before the first."""
        return 0 if self._shape is None else self._shape.numel() * self._dtype.itemsize

    @property
    def in_memory(self) -> int:
        """Bytes of RAM that there are for rows."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def sequences(self) -> int:
        """Number of sequences of a row; 1 before the first."""
        return 1 if self._shape is None else self._shape[0]

    def grow(self, like: torch.Tensor, settle: Callable[[], None] = _nothing) -> Iterator[torch.Tensor]:
        """Yield where further rows go, one tensor [rows, sequences, heads, dim] for each block, in order.

        Args:
            like: Their values [sequences, heads, rows, dim].
            settle: Waits until everything yielded so far has been written: the oldest block goes to the file then.
        """
        row = like.shape[:2] + like.shape[3:]
        if not self.length:
            if (row, like.dtype) != (self._shape, self._dtype):
                self._blocks.clear()
                self._ranges.clear()
            self._shape, self._dtype = row, like.dtype
        size, most = self._block_rows
        end = self.length + like.shape[2]
        while self.length < end:
            if self.length - self.on_disk == len(self._blocks) * size:
                if most and len(self._blocks) == most:
                    settle()
                    self._write_oldest()
                else:
                    memory = self._allocate(size * self.row_bytes)
                    self._blocks.append(memory.view(like.dtype).view(size, *row))
            block, first = divmod(self.length - self.on_disk, size)
            count = min(size - first, end - self.length)
            self.length += count
            yield self._blocks[block][first : first + count]

    def spans(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield the rows from `begin` to `end`, one tensor for each range of a file, or block, that has any."""
        for place, first, count in self._in_file(begin, min(end, self.on_disk)):
            assert self._shape is not None
            yield place.view(first * self.row_bytes, self._dtype, (count, *self._shape))
        size, _ = self._block_rows
        begin = max(begin, self.on_disk)
        while begin < end:
            block, first = divmod(begin - self.on_disk, size)
            count = min(size - first, end - begin)
            yield self._blocks[block][first : first + count]
            begin += count

    def tensor(self) -> torch.Tensor:
        """Return a copy of all rows as [sequences, heads, rows, dim]."""
        assert self._shape is not None
        spans = []
        for place, first, count in self._in_file(0, self.on_disk):
            spans.append(torch.empty(count, *self._shape, dtype=self._dtype))
            place.read(first * self.row_bytes, spans[-1])
        spans += self.spans(self.on_disk, self.length)
        return torch.cat(spans).permute(1, 2, 0, 3).contiguous()

    def keep(self, rows: int) -> None:
        """Forget all rows but the first `rows`."""
        self.length = min(self.length, max(rows, 0))
        self.on_disk = min(self.on_disk, self.length)
        if not self.length:
            self._ranges.clear()

    def _write_oldest(self) -> None:
        """Write the oldest block to the file, and have its memory be that of the newest one."""
        oldest, done = self._blocks[0], 0
        for place, first, count in self._in_file(self.on_disk, self.on_disk + len(oldest)):
            place.write(first * self.row_bytes, oldest[done : done + count])
            done += count
        self._blocks.append(self._blocks.pop(0))
        self.on_disk += len(oldest)

    def _in_file(self, begin: int, end: int) -> Iterator[tuple[KVRange, int, int]]:
        """Yield the ranges that have rows from `begin` to `end`, with the first row in each and their number; ranges
        that are missing are taken."""
        number = before = 0
        while begin < end:
            if number == len(self._ranges):
                self._ranges.append(self._new_range())
            place = self._ranges[number]
            rows = place.nbytes // self.row_bytes
            if begin < before + rows:
                count = min(before + rows, end) - begin
                yield place, begin - before, count
                begin += count
            number, before = number + 1, before + rows

    def _new_range(self) -> KVRange:
        assert self._disk is not None
        rows = self._block_rows[0] if self._ranges else rows_on_disk(self.row_bytes, self._planned, self._in_ram)
        return self._disk.take(max(rows, self._block_rows[0]) * self.row_bytes)

    @property
    def _block_rows(self) -> tuple[int, int]:
        return kv_blocks(self.row_bytes, self._planned, self._in_ram)
