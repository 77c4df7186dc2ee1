"""Filling devices in order: quick, and good enough wherever speed does not depend on which item goes where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Bin:
    """A device being filled.

    Attributes:
        device: its key.
        free: bytes that may still be placed; None for no limit.
        placed: indices of the items placed.
    """

    device: int | str
    free: int | None
    placed: list[int] = field(default_factory=list)

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more may be placed."""
        return self.free is None or nbytes <= self.free

    def place(self, index: int, nbytes: int) -> None:
        """Take item `index`, which needs `nbytes`."""
        self.placed.append(index)
        if self.free is not None:
            self.free -= nbytes


def fill_in_order(items: Iterable[tuple[int, int]], bins: Sequence[Bin]) -> list[int]:
    """Place items in order, keeping neighbours together, and return the indices of those that fit nowhere.

    An item goes to the current bin, else to the next bin that has room, which becomes the current one. An item
    too big for every bin from here on is passed over and the next one tried, so one huge item does not push
    away all that follow it. In the end, items that were passed over get a second chance in any bin.

    Args:
        items: (index, bytes) of each item, in execution order.
        bins: devices in the order they are to be filled; changed in place.
    """
    current, passed = 0, []
    for index, cost in items:
        chosen = next((at for at in range(current, len(bins)) if bins[at].fits(cost)), None)
        if chosen is None:
            passed.append((index, cost))
        else:
            current = chosen
            bins[chosen].place(index, cost)
    return [index for index, cost in passed if not _place_anywhere(index, cost, bins)]


def _place_anywhere(index: int, cost: int, bins: Sequence[Bin]) -> bool:
    for candidate in bins:
        if candidate.fits(cost):
            candidate.place(index, cost)
            return True
    return False
