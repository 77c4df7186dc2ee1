"""Rows of keys, or of values, of one layer on the host: a list of blocks that grows without moving anything.

A row is one token of all sequences, [sequences, heads, dim]. Rows of one block are contiguous: each block is one copy
over the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...limits import KV_BLOCK_BYTES

Allocate = Callable[[int], torch.Tensor]
"""Bytes -> new host memory of as many, uint8."""


class HostRows:
    """Keys, or values, of one layer.

    Args:
        allocate: Returns host memory.
        planned: Rows that the plan counts: a block has no more.

    Attributes:
        length: Number of rows.
    """

    def __init__(self, allocate: Allocate, planned: int) -> None:
        self.length = 0
        self._allocate = allocate
        self._planned = planned
        self._blocks: list[torch.Tensor] = []
        self._shape: torch.Size | None = None
        self._dtype = torch.float32

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 before the first."""
        return 0 if self._shape is None else self._shape.numel() * self._dtype.itemsize

    @property
    def sequences(self) -> int:
        """Number of sequences of a row; 1 before the first."""
        return 1 if self._shape is None else self._shape[0]

    def grow(self, like: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield where further rows go, one tensor [rows, sequences, heads, dim] for each block, in order.

        Args:
            like: Their values [sequences, heads, rows, dim].
        """
        row = like.shape[:2] + like.shape[3:]
        if not self.length:
            if (row, like.dtype) != (self._shape, self._dtype):
                self._blocks.clear()
            self._shape, self._dtype = row, like.dtype
        begin, self.length = self.length, self.length + like.shape[2]
        size = self._block_rows
        while len(self._blocks) * size < self.length:
            memory = self._allocate(size * self.row_bytes)
            self._blocks.append(memory.view(like.dtype).view(size, *row))
        yield from self.spans(begin, self.length)

    def spans(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield the rows from `begin` to `end`, one tensor for each block that has any."""
        size = self._block_rows
        while begin < end:
            block, first = divmod(begin, size)
            count = min(size - first, end - begin)
            yield self._blocks[block][first : first + count]
            begin += count

    def tensor(self) -> torch.Tensor:
        """Return a copy of all rows as [sequences, heads, rows, dim]."""
        return torch.cat(list(self.spans(0, self.length))).permute(1, 2, 0, 3).contiguous()

    def keep(self, rows: int) -> None:
        """Forget all rows but the first `rows`."""
        self.length = min(self.length, max(rows, 0))

    @property
    def _block_rows(self) -> int:
        return max(1, min(KV_BLOCK_BYTES // max(self.row_bytes, 1), self._planned))
