"""Which pages of an arena RAM has, in which of its frames, and which of them a file has. No byte is moved here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK

NONE = -1
_LATEST = 1 << 31


class Piece(NamedTuple):
    """Consecutive positions, as they lie together: from position ``begin`` of all frames on, or of the file."""

    in_ram: bool
    begin: int
    length: int


class PageTable:
    """Pages of PROMPT_BLOCK positions, and the frames of RAM, as large, that some of them have.

    Args:
        pages: Number of pages.
        frames: Number of frames.

    Attributes:
        written: Pages of which the file has all there is.
        both: Those of them that have a frame, too.
    """

    def __init__(self, pages: int, frames: int) -> None:
        self.frames = frames
        self.written: set[int] = set()
        self.both: set[int] = set()
        self._frame_of = torch.full((pages,), NONE, dtype=torch.long)
        self._page_of = torch.full((frames,), NONE, dtype=torch.long)
        self._free = list(range(frames - 1, -1, -1))
        self._filled = torch.zeros(pages, dtype=torch.long)
        self._read = torch.zeros(pages, dtype=torch.long)  # the step that read it last
        self._given = torch.zeros(pages, dtype=torch.long)  # the how manieth frame it was given
        self._count = self._step = 0

    @property
    def free(self) -> int:
        """Frames that no page has."""
        return len(self._free)

    def frame(self, page: int) -> int:
        """Return the frame of a page; NONE if RAM has none."""
        return int(self._frame_of[page])

    def give(self, page: int) -> int:
        """Give a page a free frame, and return it."""
        frame = self._free.pop()
        self._frame_of[page], self._page_of[frame] = frame, page
        self._count += 1
        self._given[page] = self._count
        return frame

    def take(self, page: int) -> None:
        """Take a page's frame away, if it has one."""
        frame = self.frame(page)
        if frame != NONE:
            self._frame_of[page] = self._page_of[frame] = NONE
            self._free.append(frame)
            self.both.discard(page)

    def write(self, page: int) -> None:
        """Note that the file has a page."""
        self.written.add(page)
        if self.frame(page) != NONE:
            self.both.add(page)

    def outdate(self, page: int) -> None:
        """Note that what the file has of a page is not all there is any more."""
        self.written.discard(page)
        self.both.discard(page)

    def forget(self, page: int) -> None:
        """Note that nobody holds a page any more."""
        self.take(page)
        self.outdate(page)
        self._filled[page] = self._read[page] = 0

    def fill(self, rows: torch.Tensor) -> None:
        """Note that the positions ``rows`` are written."""
        self._filled.scatter_reduce_(0, rows // PROMPT_BLOCK, rows % PROMPT_BLOCK + 1, "amax")

    def read(self, pages: torch.Tensor) -> None:
        """Note that the next step reads these pages."""
        self._step += 1
        self._read[pages] = self._step

    def oldest(self, keep: Collection[int]) -> list[int]:
        """Return the pages with frames but those to keep: whole ones first, of these the ones that were read the
        longest ago, of these the ones that were given a frame the longest ago."""
        pages = self._page_of[self._page_of != NONE]
        if keep:
            pages = pages[~torch.isin(pages, torch.tensor(sorted(keep)))]
        parts = (self._filled[pages] < PROMPT_BLOCK).long() << 62
        order = parts | (self._read[pages] % _LATEST << 31) | self._given[pages] % _LATEST
        found: list[int] = pages[order.argsort()].tolist()
        return found

    def is_whole(self, page: int) -> bool:
        """Whether all positions of a page are written."""
        return bool(self._filled[page] == PROMPT_BLOCK)

    def held(self, rows: torch.Tensor) -> torch.Tensor:
        """Return of each of the positions ``rows`` whether its page has a frame."""
        return self._frame_of[rows // PROMPT_BLOCK] != NONE

    def in_frames(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the positions of all frames that ``rows`` have, whose pages have frames."""
        return self._frame_of[rows // PROMPT_BLOCK] * PROMPT_BLOCK + rows % PROMPT_BLOCK

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield where the positions ``begin`` to ``end`` lie, as many together as may be."""
        first = begin // PROMPT_BLOCK
        frames: Seq[int] = self._frame_of[first : (end - 1) // PROMPT_BLOCK + 1].tolist()
        known: Piece | None = None
        for page, frame in enumerate(frames, first):
            at, stop = max(begin, page * PROMPT_BLOCK), min(end, (page + 1) * PROMPT_BLOCK)
            place = at if frame == NONE else frame * PROMPT_BLOCK + at % PROMPT_BLOCK
            if known is not None and known.in_ram == (frame != NONE) and known.begin + known.length == place:
                known = known._replace(length=known.length + stop - at)
                continue
            if known is not None:
                yield known
            known = Piece(frame != NONE, place, stop - at)
        if known is not None:
            yield known
