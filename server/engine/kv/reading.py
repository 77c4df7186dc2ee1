"""What attention reads of each layer at once: positions of an arena, each fetched once, whoever shares them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch


class Attended(NamedTuple):
    """What an attention call attends to.

    Attributes:
        positions: Of the arena, on the host.
        fresh: How many of them, at the end, the step itself computes.
        row: The step's row of the first of these.
    """

    positions: torch.Tensor
    fresh: int = 0
    row: int = 0


class Part(NamedTuple):
    """Consecutive positions ``begin`` to ``end``, in order from place ``at`` on of what is read."""

    at: int
    begin: int
    end: int


class Repeat(NamedTuple):
    """``length`` places from ``at`` on that have the positions of those from ``of`` on, too."""

    at: int
    of: int
    length: int


@dataclass(frozen=True, eq=False)
class Reading:
    """What attention reads of each layer at once.

    Attributes:
        rows: Positions of the arena, on the host, in the order that they are read in.
        fresh: Parts of ``rows`` that the step itself computes: where each begins there, at which of the step's rows,
            and how many rows it has.
    """

    rows: torch.Tensor
    fresh: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, attended: Seq[Attended]) -> Reading:
        """What calls attend to, one after the other."""
        ends = accumulate(len(each.positions) for each in attended)
        fresh = ((end - each.fresh, each.row, each.fresh) for end, each in zip(ends, attended, strict=True))
        rows = torch.cat([each.positions for each in attended])
        return cls(rows, tuple(part for part in fresh if part[2]))

    @cached_property
    def parts(self) -> tuple[list[Part], list[Repeat]]:
        """What is fetched, all but the step's own rows, and what has the same positions as that: blocks of one prompt
        share all before them."""
        return divided(self._runs())

    def _runs(self) -> Iterator[Part]:
        """Yield each run of consecutive positions that is fetched."""
        at = 0
        for stop, _, count in (*self.fresh, (len(self.rows), 0, 0)):
            for begin, end in consecutive(self.rows[at:stop]) if at < stop else ():
                yield Part(at, begin, end)
                at += end - begin
            at = stop + count

    def fetches(self, other: Reading) -> bool:
        """Whether the same is fetched for another one, to the same places."""
        return len(self.rows) == len(other.rows) and self.parts == other.parts

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in ``rows`` of the step's own, and the step's rows that belong there, on the host."""
        found = [
            torch.cat([torch.arange(part[which], part[which] + part[2]) for part in self.fresh]) for which in (0, 1)
        ]
        return found[0], found[1]


class StepReadings(Protocol):
    """What the layers of a step read."""

    def readings(self, device: torch.device, window: int | None) -> Seq[Reading]:
        """Return what layers of a device with a window read, in order."""
        ...

    def ahead(self, window: int | None) -> Reading | None:
        """Return what layers with a window are expected to read first in the next step; None: it is not known."""
        ...


def consecutive(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Return begin and end of each run of consecutive numbers in ``rows``, of at least one."""
    ends = (rows.diff() != 1).nonzero().flatten()
    begins = rows[torch.cat([torch.zeros(1, dtype=torch.long), ends + 1])]
    lasts = rows[torch.cat([ends, torch.tensor([len(rows) - 1])])]
    return [(begin, last + 1) for begin, last in zip(begins.tolist(), lasts.tolist(), strict=True)]


def divided(runs: Iterable[Part]) -> tuple[list[Part], list[Repeat]]:
    """Return the first places of all positions of ``runs``, and the others."""
    parts: list[Part] = []
    repeats: list[Repeat] = []
    known: list[tuple[int, int, int]] = []  # begin, end and place of those met so far: apart from one another, in order
    for at, begin, end in runs:
        while begin < end:
            number = bisect_right(known, begin, key=itemgetter(0))  # of the first that begins behind it
            first, last, place = known[number - 1] if number else (0, 0, 0)
            if begin < last:
                count = min(end, last) - begin
                repeats.append(Repeat(at, place + begin - first, count))
            else:
                stop = min(end, known[number][0]) if number < len(known) else end
                count = stop - begin
                parts.append(Part(at, begin, stop))
                known.insert(number, (begin, stop, at))
            begin, at = begin + count, at + count
    return parts, repeats
