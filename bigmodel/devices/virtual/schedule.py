"""How late strict accelerators do work, and how often their host has waited."""

from __future__ import annotations

import random
from typing import NamedTuple

POLLS = 2
"""How many times `Event.query` says that work is under way, in the latest schedule, before it has finished."""

MOST_DELAYED = 1024
"""How much work a stream queues before a launch waits, as on CUDA."""


class Schedule:
    """Decides how late work is done that may be late: as late as the rules allow, or by chance.

    Args:
        seed: None: as late as possible; a number: at random, the same for the same number.
        compute: Whether computation may be late.
    """

    def __init__(self, seed: int | None = None, compute: bool = False) -> None:
        self._random = None if seed is None else random.Random(seed)
        self.compute = compute

    def is_late(self) -> bool:
        """Whether work that may be late is late this time."""
        return self._random is None or self._random.random() < 0.5

    def is_compute_late(self) -> bool:
        """Whether an operation that may be late is late this time: more often, since there are more of them."""
        return self._random is None or self._random.random() < 0.9


class HostWaits(NamedTuple):
    """How often the host has waited for strict accelerators.

    Attributes:
        copies_to_device: Copies to a device that held the host: those that block, and those of pageable memory.
        copies_to_host: Copies to the host that held it, reads of single values among them.
        synchronizations: Calls of `synchronize`, of events, streams or devices.
    """

    copies_to_device: int = 0
    copies_to_host: int = 0
    synchronizations: int = 0

    def since(self, earlier: HostWaits) -> HostWaits:
        """Return how often it has waited since `earlier`."""
        return HostWaits(*(now - then for now, then in zip(self, earlier)))
