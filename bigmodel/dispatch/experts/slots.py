"""The slots of an expert cache: their users, and which to overwrite next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ...devices import Event
from ..streaming.slots import Slot, SlotCache
from .policy import ExpertPolicy

Key = tuple[int, int]
"""Number of a layer, and of one of its experts."""


@dataclass(eq=False)
class ExpertSlot(Slot[Key]):
    """A slot for one expert; its users are counted in `ExpertSlots.users` under its number."""

    number: int = 0


class ExpertSlots(SlotCache[Key, ExpertSlot]):
    """The slots of one expert cache.

    Args:
        memory: uint8, (slots, bytes of an expert).
        policy: Estimates the time until the next use of an expert.
        mark: The event to wait for before the memory is first written: an asynchronous device may still use the
            previous contents of that memory. None: no event.
    """

    def __init__(self, memory: torch.Tensor, policy: ExpertPolicy, mark: Event | None = None) -> None:
        marks = [] if mark is None else [mark]
        super().__init__([ExpertSlot(each, marks=list(marks), number=number) for number, each in enumerate(memory)])
        self._policy = policy
        self._contents = np.full((2, len(self.slots)), -1)
        self.users = np.zeros(len(self.slots), dtype=np.int64)
        """Number of forwards that compute with each slot's content or wait for it: an array, to update many at once.
        """

    def __getitem__(self, number: int) -> ExpertSlot:
        return self.slots[number]

    def is_used(self, slot: ExpertSlot) -> bool:
        return bool(self.users[slot.number])

    @property
    def free(self) -> int:
        """Number of slots that are not in use."""
        return int(np.count_nonzero(self.users == 0))

    @property
    def empty(self) -> int:
        """Number of slots without an expert."""
        return int(np.count_nonzero(self._contents[0] < 0))

    def overwritable(self, count: int, keep: Iterable[ExpertSlot], later: Iterable[Key]) -> list[ExpertSlot] | None:
        """Return `count` slots to overwrite; None if there are fewer.

        Args:
            count: Number of slots.
            keep: Slots that must not be overwritten, in addition to those in use.
            later: Experts whose slots are overwritten last.
        """
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
        return [self.slots[number] for number in longest]

    def placed(self, key: Key, slot: ExpertSlot) -> None:
        """Record for the policy that the expert `key` is in `slot`."""
        self._contents[:, slot.number] = key

    def forget(self, slot: ExpertSlot) -> None:
        super().forget(slot)
        self._contents[:, slot.number] = -1
