"""The slots of an expert cache: what lies in each, who uses it, and which to overwrite next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from ...devices import Event
from .policy import ExpertPolicy

Version = tuple[int, int]

Key = tuple[int, int]
"""Number of a layer, and of one of its experts."""


@dataclass(eq=False)
class ExpertSlot:
    """Room for one expert. `marks` are the computations that must end before it may be overwritten."""

    number: int
    slab: torch.Tensor
    content: Key | None = None
    version: Version = (0, 0)
    ready: Event | None = None
    marks: list[Event] = field(default_factory=list)


class ExpertSlots:
    """A fixed number of slots, all empty at first. Not to be used by several threads at once.

    Args:
        memory: uint8, (slots, bytes of an expert).
        policy: Says for how long an expert will not be wanted.
        mark: What must end before the memory is first written to: a device that computes behind the host may not be
            done yet with what lay there before. None: nothing.
    """

    def __init__(self, memory: torch.Tensor, policy: ExpertPolicy, mark: Event | None = None) -> None:
        self._policy = policy
        marks = [] if mark is None else [mark]
        self._slots = [ExpertSlot(number, slab, marks=list(marks)) for number, slab in enumerate(memory)]
        self._slot_of: dict[Key, ExpertSlot] = {}
        self._contents = np.full((2, len(self._slots)), -1)
        self.users = np.zeros(len(self._slots), dtype=np.int64)
        """How many forwards compute with what is in each slot, or wait for it."""

    def __getitem__(self, number: int) -> ExpertSlot:
        return self._slots[number]

    def __contains__(self, key: Key) -> bool:
        return key in self._slot_of

    @property
    def free(self) -> int:
        """How many slots nobody uses."""
        return int(np.count_nonzero(self.users == 0))

    def find(self, key: Key, version: Version) -> ExpertSlot | None:
        """Return the slot of an expert, if it is there and the host's tensors have not changed since."""
        slot = self._slot_of.get(key)
        if slot is not None and slot.version != version and not self.users[slot.number]:
            self.forget(slot)
            return None
        return slot

    def victims(self, count: int, keep: Iterable[ExpertSlot], later: Iterable[Key]) -> list[ExpertSlot] | None:
        """Return `count` slots to overwrite: none in use or in `keep`, those of the experts `later` last of all; None
        if there are not so many."""
        if not count:
            return []
        waits = self._policy.waits(self._contents[0], self._contents[1])
        waits[self._contents[0] < 0] = np.inf
        waits[[self._slot_of[key].number for key in later if key in self._slot_of]] = 0.0
        waits[self.users > 0] = -np.inf
        waits[[slot.number for slot in keep]] = -np.inf
        longest = np.argsort(-waits, kind="stable")[:count]
        if len(longest) < count or waits[longest[-1]] == -np.inf:
            return None
        return [self._slots[number] for number in longest]

    def put(self, key: Key, version: Version, slot: ExpertSlot) -> None:
        """Note that an expert lies in `slot`, which is empty, or is on its way there."""
        slot.content, slot.version = key, version
        self._contents[:, slot.number] = key
        self._slot_of[key] = slot

    def forget(self, slot: ExpertSlot) -> None:
        """Note that nothing lies in `slot`."""
        if slot.content is not None:
            self._slot_of.pop(slot.content, None)
        slot.content = None
        self._contents[:, slot.number] = -1
