"""`ExpertSplit`: the link fetches some of the experts that are not in the cache while the host computes the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

NEARLY = 1.05
"""How many times the seconds of the fastest division one may take that fetches more."""


@dataclass(frozen=True)
class ExpertSplit:
    """The rates by which a call of few tokens divides its missing experts between the link and the host.

    Of m missing experts k are computed on the host, where they lie, while m - k are fetched: the k for which both end
    first, the least of start + max((m - k) * fetch, k * compute), or 0 if m * fetch is less. Of those that take at most
    `NEARLY` as long k is the least: what is fetched may be chosen again.

    Attributes:
        fetch: seconds in which the link fetches one expert.
        compute: seconds in which the host computes one.
        start: seconds of a call that computes any on the host, beyond these: its tokens cross to the host and products
            back, and the experts function runs on the host and twice on the accelerator: for hits, and for arrivals.
        below: calls of fewer tokens than this are divided; larger ones fetch all.
    """

    fetch: float
    compute: float
    start: float
    below: int

    def seconds(self, missing: int, on_host: int) -> float:
        """Return the seconds until `missing` experts are there or computed, `on_host` of them on the host."""
        fetched = (missing - on_host) * self.fetch
        return self.start + max(fetched, on_host * self.compute) if on_host else fetched

    def on_host(self, missing: int) -> int:
        """Return how many of `missing` experts the host computes."""
        return _on_host(self, missing)

    def expected(self, chosen: float, missing: float) -> tuple[float, float]:
        """Return the expected seconds of a call, and how many experts the host computes.

        Args:
            chosen: expected number of experts that are chosen.
            missing: expected number of those that are not in the cache: each is with the same probability.
        """
        count = max(round(chosen), 1)
        chance = min(missing / count, 1.0)
        seconds = on_host = 0.0
        for number in range(1, count + 1):
            weight = comb(count, number) * chance**number * (1 - chance) ** (count - number)
            least = self.on_host(number)
            seconds += weight * self.seconds(number, least)
            on_host += weight * least
        return seconds, on_host


@lru_cache(maxsize=4096)
def _on_host(split: ExpertSplit, missing: int) -> int:
    seconds = [split.seconds(missing, on_host) for on_host in range(missing + 1)]
    return next(on_host for on_host, each in enumerate(seconds) if each <= NEARLY * min(seconds))
