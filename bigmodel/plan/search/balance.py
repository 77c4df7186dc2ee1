"""Stages of even time: a model that is resident on several accelerators is divided such that each computes as long.

With several steps in flight the slowest stage bounds the throughput, and what the others have left they idle. The
groups stay in the order they run, so that a pass crosses from one accelerator to the next as seldom as may be.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

HALVINGS = 40
"""How often the interval is halved in which the least seconds of the slowest stage are."""


@dataclass(frozen=True)
class Share:
    """What one accelerator may take of a sequence of groups.

    Attributes:
        seconds: seconds of each group there.
        room: bytes of groups that fit on it.
        begun: seconds of what is there in any case.
    """

    seconds: Sequence[float]
    room: int
    begun: float = 0.0


def even_cuts(nbytes: Sequence[int], shares: Sequence[Share]) -> list[int] | None:
    """Return the first group of each accelerator but the first one, such that the slowest one takes least.

    Of several such divisions it is that in which each one takes nearest to the mean of those not yet given any.

    Args:
        nbytes: bytes of each group, in the order they run.
        shares: what each accelerator may take, in the order in which a pass comes to them.

    Returns:
        None if the groups do not fit.
    """
    if min(share.room for share in shares) < 0:
        return None
    ranges = [_Range(nbytes, share) for share in shares]
    low, high = 0.0, max(share.begun + sum(share.seconds) for share in shares)
    if not _fit(ranges, high, len(nbytes)):
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fit(ranges, middle, len(nbytes)) else (middle, high)
    return _even_within(ranges, high * (1 + 1e-9), len(nbytes))


class _Range:
    """Seconds and bytes of consecutive groups on one accelerator."""

    def __init__(self, nbytes: Sequence[int], share: Share) -> None:
        self._bytes = list(accumulate(nbytes, initial=0))
        self._seconds = list(accumulate(share.seconds, initial=0.0))
        self._share = share

    def seconds(self, first: int, end: int) -> float:
        """Seconds of the accelerator with groups `first` to `end`."""
        return self._share.begun + self._seconds[end] - self._seconds[first]

    def last(self, first: int, most: float) -> int:
        """Return the end of the most groups from `first` on that fit and take `most` seconds; `first` if none do."""
        by_bytes = bisect_right(self._bytes, self._bytes[first] + self._share.room) - 1
        by_time = bisect_right(self._seconds, self._seconds[first] + most - self._share.begun) - 1
        return max(first, min(by_bytes, by_time))

    def first(self, end: int, most: float) -> int:
        """Return the first one of the most groups up to `end` that fit and take `most` seconds; `end` if none do."""
        by_bytes = bisect_left(self._bytes, self._bytes[end] - self._share.room)
        by_time = bisect_left(self._seconds, self._seconds[end] - most + self._share.begun)
        return min(end, max(by_bytes, by_time))


def _fit(ranges: Sequence[_Range], most: float, count: int) -> bool:
    """Whether all groups find a place where no range takes more than `most` seconds."""
    end = 0
    for each in ranges:
        if each.seconds(end, end) > most:
            return False
        end = each.last(end, most)
    return end == count


def _even_within(ranges: Sequence[_Range], most: float, count: int) -> list[int]:
    """Return the first group of each range but the first, none of which takes more than `most` seconds."""
    earliest = [count] * len(ranges)
    for at in range(len(ranges) - 1, 0, -1):
        earliest[at - 1] = ranges[at].first(earliest[at], most)
    cuts: list[int] = []
    begin = 0
    for at, each in enumerate(ranges[:-1]):
        mean, last = _mean(ranges[at:], begin, count), each.last(begin, most)
        distances = {end: abs(each.seconds(begin, end) - mean) for end in range(min(earliest[at], last), last + 1)}
        begin = min(distances, key=distances.__getitem__)
        cuts.append(begin)
    return cuts


def _mean(ranges: Sequence[_Range], begin: int, count: int) -> float:
    """Return the mean seconds of ranges that take the groups from `begin` on, on devices of their mean speed."""
    begun = sum(each.seconds(begin, begin) for each in ranges)
    groups = sum(each.seconds(begin, count) for each in ranges) - begun
    return (groups / len(ranges) + begun) / len(ranges)
