"""The budget of keys and values: who holds how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigmodel.devices import format_size
from bigmodel.errors import ServeError
from bigmodel.server.engine.cache import GROWTH, round_up


@dataclass(frozen=True)
class KVBudget:
    """What keys and values may take. ``bytes_per_token`` and ``bytes_total`` are per device."""

    bytes_per_token: Mapping[str, int]
    bytes_total: Mapping[str, int]

    @property
    def tokens(self) -> int:
        """Positions that fit every device's share, in whole growth steps."""
        fits = [self.bytes_total[device] // per for device, per in self.bytes_per_token.items() if per]
        tokens = min(fits, default=0) // GROWTH * GROWTH
        if not tokens:
            device, per = min(self.bytes_per_token.items(), key=lambda item: self.bytes_total[item[0]] / (item[1] or 1))
            raise ServeError(
                f"{format_size(self.bytes_total[device])} for keys and values on {device} hold not even {GROWTH} "
                f"tokens of {format_size(per)} each; give more, or offload more weights"
            )
        return tokens


class TokenPool:
    """Counts positions of key-value buffers handed out; never more than ``capacity`` at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def fits(self, tokens: int) -> bool:
        """Whether one sequence of ``tokens`` could ever be held."""
        return round_up(tokens) <= self.capacity

    def take(self, positions: int) -> bool:
        """Take ``positions``; False, and nothing taken, when they are not free."""
        if positions > self.free:
            return False
        self.used += positions
        return True

    def give_back(self, positions: int) -> None:
        if positions > self.used:
            raise RuntimeError(f"{positions} positions given back, {self.used} held")
        self.used -= positions
