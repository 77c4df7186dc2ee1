"""The file of an arena's pages: of each layer all keys, then all values, each position in its place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

import torch

from bigmodel.dispatch.streaming.kv_file import KVDisk, aligned
from bigmodel.limits import FILE_ALIGNMENT
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.kv.reading import consecutive

Frames = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [positions of all frames, key-value heads, dim], by layer."""


class PageFile:
    """A file without a name. Only what is written to it takes space.

    Args:
        disk: Where it is made.
        pages: Number of pages.
        layers: Indices of the layers.
        position_bytes: Most bytes that one layer's keys and values of a position take.
    """

    def __init__(self, disk: KVDisk, pages: int, layers: Collection[int], position_bytes: int) -> None:
        self._disk = disk
        self._positions = pages * PROMPT_BLOCK
        self._number = {layer: number for number, layer in enumerate(sorted(layers))}
        size = self._positions * position_bytes + FILE_ALIGNMENT  # values begin at a multiple of the alignment
        self._layer_bytes = aligned(size)
        self._file = disk.sparse(self._layer_bytes * len(self._number))

    def write(self, pages: Iterable[tuple[int, int]], frames: Frames) -> None:
        """Write pages, given with the frame of each, of all layers.

        Raises:
            KVDiskError: The disk cannot be written.
        """
        placed = []
        for page, frame in pages:
            rows = slice(frame * PROMPT_BLOCK, (frame + 1) * PROMPT_BLOCK)
            for layer, held in frames.items():
                placed += [
                    (self._place(layer, which, each, page * PROMPT_BLOCK), each[rows])
                    for which, each in enumerate(held)
                ]
        self._file.write_all(placed)

    def write_rows(self, layer: int, rows: Seq[tuple[int, int]], new: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write keys and values of runs of positions of a layer, which ``new`` has one after the other.

        Raises:
            KVDiskError: The disk cannot be written.
        """
        placed = []
        for which, each in enumerate(new):
            at = 0
            for begin, end in rows:
                placed.append((self._place(layer, which, each, begin), each[at : at + end - begin].contiguous()))
                at += end - begin
        self._file.write_all(placed)

    def view(self, layer: int, which: int, like: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        """Return keys (0) or values (1) of positions from ``begin`` on, of the shape and dtype of those of ``like``, in
        the mapped file: it says to a `DiskReader` where they are."""
        return self._file.map.tensor(like.dtype, (count, *like.shape[1:]), self._place(layer, which, like, begin))

    def read(self, page: int, frame: int, frames: Frames) -> None:
        """Read a page of all layers into a frame.

        Raises:
            KVDiskError: The disk cannot be read.
        """
        rows = slice(frame * PROMPT_BLOCK, (frame + 1) * PROMPT_BLOCK)
        for layer, held in frames.items():
            for which, each in enumerate(held):
                self._file.read(self._place(layer, which, each, page * PROMPT_BLOCK), each[rows])

    def copy(self, layer: int, which: int, like: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        """Return what `view` shows, read into memory of its own.

        Raises:
            KVDiskError: The disk cannot be read.
        """
        found = torch.empty(count, *like.shape[1:], dtype=like.dtype)
        self._file.read(self._place(layer, which, like, begin), found)
        return found

    def forget(self, pages: Seq[int], frames: Frames) -> None:
        """Free the space of pages."""
        for begin, end in consecutive(torch.tensor(sorted(pages))) if pages else ():
            for layer, held in frames.items():
                for which, each in enumerate(held):
                    first = self._place(layer, which, each, begin * PROMPT_BLOCK)
                    self._file.punch(first, (end - begin) * PROMPT_BLOCK * each[0].nbytes)

    @property
    def space(self) -> int:
        """Bytes that it takes on the disk."""
        return self._file.space

    def _place(self, layer: int, which: int, like: torch.Tensor, position: int) -> int:
        begin = self._layer_bytes * self._number[layer]
        row = like[0].nbytes
        if which:  # keys and values may be of different sizes: these end where the layer does
            begin += self._layer_bytes - aligned(self._positions * row)
        return begin + position * row
