"""Pages of some layers in frames of RAM, and the older ones in a file.

    before a step:  each page that it writes to gets a frame; where none is free, the page that is read the longest ago
                    loses its own, the oldest of those that every step reads
    meanwhile:      the pages that lose theirs next are written to the file, by a thread, so that no step waits for it

A page is in the same place for all layers. What the file has is read on the way to the accelerator, ahead of use
(:mod:`.host_pages`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from bigmodel.devices import Event
from bigmodel.dispatch.streaming.host_kv import OlderRows
from bigmodel.errors import KVDiskError
from bigmodel.limits import KV_SPARE_PAGES
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.kv.page_file import PageFile
from bigmodel.server.engine.kv.page_table import NONE, PageTable
from bigmodel.server.engine.kv.reading import consecutive


class PageTiers:
    """The pages of an arena in RAM and in a file. Used by the engine's thread; `gone` may be called by any.

    Args:
        pages: Number of pages.
        frames: Pages that RAM has memory for.
        layers: Indices of the layers.
        position_bytes: Most bytes that one layer's keys and values of a position take.
        older: Where the file is, and what reads it.

    Attributes:
        frames: Keys and values [positions of all frames, key-value heads, dim], by layer.
        table: Which page is where.
    """

    def __init__(self, pages: int, frames: int, layers: Collection[int], position_bytes: int, older: OlderRows) -> None:
        self.frames: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.table = PageTable(pages, frames)
        self.older = older
        self._file = PageFile(older.disk, pages, layers, position_bytes)
        self._gone: deque[int] = deque()
        self._writes: dict[int, Future[None]] = {}  # pages that are being written
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="pages to disk")

    @property
    def positions(self) -> int:
        """Positions of all frames."""
        return self.table.frames * PROMPT_BLOCK

    @property
    def used(self) -> tuple[int, int]:
        """Pages that have a frame, and pages that the file has."""
        return self.table.frames - self.table.free, len(self.table.written)

    def gone(self, page: int) -> None:
        """Note that nobody holds a page any more."""
        self._gone.append(page)

    def prepare(self, written: torch.Tensor, read: torch.Tensor, copied: Callable[[], Seq[Event]]) -> None:
        """Have all pages that a step writes to in RAM.

        Args:
            written: Positions that it writes to.
            read: Pages that it reads.
            copied: Returns events after which frames have what earlier steps stored there, and what was fetched from
                them has been. Asked only where a page gets a frame, or is written: until then what the step reads
                first may be on its way.

        Raises:
            KVDiskError: There is no memory for them without the disk, which cannot be written or read.
        """
        self._forget()
        self.table.read(read)
        pages: list[int] = (written // PROMPT_BLOCK).unique().tolist()
        for page in pages:
            if self.table.frame(page) == NONE:
                self._bring(page, set(pages), copied())
            self._outdate(page)
        self.table.fill(written)
        self._write_ahead(set(pages), copied)

    def placed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the positions of the frames that ``rows``, which are written to, have."""
        return self.table.in_frames(rows)

    def write(self, layer: int, rows: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Store keys and values [tokens, key-value heads, dim] of the positions ``rows`` at once: where a frame is
        free, or the page has one, there, else in the file.

        Raises:
            KVDiskError: The disk cannot be written.
        """
        self._forget()
        for page in (rows // PROMPT_BLOCK).unique().tolist():
            if self.table.frame(page) == NONE and page not in self.table.written and self.table.free:
                self.table.give(page)
            if self.table.frame(page) != NONE:
                self._outdate(page)
        held = self.table.held(rows)
        if held.any():
            for frames, each in zip(self.frames[layer], new, strict=True):
                frames.index_copy_(0, self.table.in_frames(rows[held]), each[held])
        if not held.all():
            there = rows[~held]
            self._file.write_rows(layer, consecutive(there), (new[0][~held], new[1][~held]))
            for page in (there // PROMPT_BLOCK).unique().tolist():
                self.table.write(page)
        self.table.fill(rows)

    def spans(self, layer: int, which: int, begin: int, end: int) -> Iterator[tuple[bool, torch.Tensor]]:
        """Yield keys (0) or values (1) of the positions ``begin`` to ``end``: whether RAM has them, and a view."""
        held = self.frames[layer][which]
        for in_ram, at, count in self.table.pieces(begin, end):
            yield in_ram, held[at : at + count] if in_ram else self._file.view(layer, which, held, at, count)

    def _bring(self, page: int, keep: Collection[int], computed: Seq[Event]) -> None:
        """Give a page a frame, with what the file has of it."""
        if not self.table.free:
            self._evict(keep, computed)
        frame = self.table.give(page)
        if page in self.table.written:
            try:
                _wait(computed)  # copies of what the frame had
                self._file.read(page, frame, self.frames)
            except BaseException:
                self.table.take(page)
                raise

    def _evict(self, keep: Collection[int], computed: Seq[Event]) -> None:
        """Take the frame of a page that the file has, or is given now: of the one that is read the longest ago."""
        pages = self.table.oldest(keep)
        if not pages:
            raise RuntimeError(f"a step writes to more than the {self.table.frames} pages that RAM has memory for")
        page = self._written(pages)
        if page is None and self._writes:
            for write in list(self._writes.values()):
                write.exception()
            page = self._written(pages)
        if page is None:
            page = pages[0]
            failure = self._write(page, computed).exception()
            self._collect()
            if failure is not None:  # an error of its own: that of a thread would hold what this step holds
                why = failure.why if isinstance(failure, KVDiskError) else type(failure).__name__
                raise KVDiskError(str(failure), why) from failure.__cause__
        self.table.take(page)

    def _written(self, pages: Seq[int]) -> int | None:
        """Return the first of these pages that the file has."""
        self._collect()
        return next((page for page in pages if page in self.table.both), None)

    def _write_ahead(self, keep: Collection[int], copied: Callable[[], Seq[Event]]) -> None:
        """Have the pages that lose their frames next written, once the free ones run short."""
        self._collect()
        wanted = KV_SPARE_PAGES - self.table.free - len(self.table.both) - len(self._writes)
        if wanted <= 0:
            return
        there = self.table.both | self._writes.keys()
        for page in [page for page in self.table.oldest(keep) if page not in there][:wanted]:
            if self.table.is_whole(page):
                self._write(page, copied())

    def _write(self, page: int, computed: Seq[Event]) -> Future[None]:
        """Start writing a page that has a frame, unless that has been started."""
        if page not in self._writes:
            frame, file, frames = self.table.frame(page), self._file, dict(self.frames)

            def work() -> None:
                _wait(computed)
                file.write([(page, frame)], frames)

            self._writes[page] = self._writer.submit(work)
        return self._writes[page]

    def _collect(self) -> None:
        """Note the pages that have been written since; those that failed are tried again when a frame is needed."""
        for page in [page for page, write in self._writes.items() if write.done()]:
            if self._writes.pop(page).exception() is None:
                self.table.write(page)

    def _outdate(self, page: int) -> None:
        """Forget what the file has of a page that has a frame and is written to."""
        self._settle(page)
        if page in self.table.written:
            self.table.outdate(page)
            self._file.forget([page], self.frames)

    def _settle(self, page: int) -> None:
        """Wait until a page is not being written."""
        write = self._writes.get(page)
        if write is not None:
            write.exception()
            self._collect()

    def _forget(self) -> None:
        """Free what pages have that nobody holds any more."""
        pages = {self._gone.popleft() for _ in range(len(self._gone))}
        for page in pages & self._writes.keys():
            self._settle(page)
        self._file.forget([page for page in pages if page in self.table.written], self.frames)
        for page in pages:
            self.table.forget(page)

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of the positions ``rows``, on the host.

        Raises:
            KVDiskError: The disk cannot be read.
        """
        pieces = [piece for begin, end in consecutive(rows) for piece in self.table.pieces(begin, end)]
        found = []
        for which, held in enumerate(self.frames[layer]):
            spans = [
                held[at : at + count] if in_ram else self._file.copy(layer, which, held, at, count)
                for in_ram, at, count in pieces
            ]
            found.append(torch.cat(spans))
        return found[0], found[1]


def _wait(events: Seq[Event]) -> None:
    for event in events:
        event.synchronize()
