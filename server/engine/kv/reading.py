"""What attention reads of each layer at once: positions of an arena, each fetched once, whoever shares them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import torch


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

    @cached_property
    def parts(self) -> tuple[list[Part], list[Repeat]]:
        """What is fetched, and what has the same positions as that: blocks of one prompt share all before them."""
        return divided(consecutive(self.rows))

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in ``rows`` of the step's own, and the step's rows that belong there, on the host."""
        found = [
            torch.cat([torch.arange(part[which], part[which] + part[2]) for part in self.fresh]) for which in (0, 1)
        ]
        return found[0], found[1]


def consecutive(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Return begin and end of each run of consecutive numbers in ``rows``, of at least one."""
    ends = (rows.diff() != 1).nonzero().flatten()
    begins = rows[torch.cat([torch.zeros(1, dtype=torch.long), ends + 1])]
    lasts = rows[torch.cat([ends, torch.tensor([len(rows) - 1])])]
    return [(begin, last + 1) for begin, last in zip(begins.tolist(), lasts.tolist(), strict=True)]


def divided(runs: Seq[tuple[int, int]]) -> tuple[list[Part], list[Repeat]]:
    """Return the first places of all positions of ``runs``, which are read one after the other, and the others."""
    parts: list[Part] = []
    repeats: list[Repeat] = []
    known: list[tuple[int, int, int]] = []  # begin, end and place of those met so far: apart from one another, in order
    at = 0
    for begin, end in runs:
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
