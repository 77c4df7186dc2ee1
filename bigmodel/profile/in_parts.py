"""What experts take that are computed with some after others, because there is not room for all."""

from __future__ import annotations

from dataclasses import dataclass

from .events import Route


@dataclass(frozen=True)
class InParts:
    """How a mixture's experts are computed with that do not all fit the device: some after others.

    Attributes:
        share: how much of the choices is computed at once.
        least: bytes of what is made whole all the same, and of anything smaller.
        beside: bytes of what each choice comes to, until all have, and of the tokens of a part.
    """

    share: float
    least: int
    beside: int

    def bytes_of(self, nbytes: int) -> int:
        """Return the bytes that something takes which takes `nbytes` where all is computed at once."""
        return nbytes if nbytes <= self.least else int(nbytes * self.share)


ALL_AT_ONCE = InParts(1.0, 0, 0)


def in_parts(route: Route, slots: int) -> InParts:
    """Return how experts are computed with where there is room for `slots` of them: half that many at once, while the
    others arrive."""
    if slots >= route.choice.wanted:
        return ALL_AT_ONCE
    share = min(1.0, max(1, slots // 2) / route.choice.wanted)
    return InParts(share, route.nbytes, int(route.nbytes * route.choice.per_token * (1 + share)))
