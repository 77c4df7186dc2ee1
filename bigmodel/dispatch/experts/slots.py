"""The slots of an expert cache: who uses them, and which to overwrite next."""

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
        policy: Says for how long an expert will not be wanted.
        mark: What must end before the memory is first written to: a device that computes behind the host may not be
            done yet with what lay there before. None: nothing.
    """

    def __init__(self, memory: torch.Tensor, policy: ExpertPolicy, mark: Event | None = None) -> None:
        marks = [] if mark is None else [mark]
        super().__init__([ExpertSlot(each, marks=list(marks), number=number) for number, each in enumerate(memory)])
        self._policy = policy
        self._contents = np.full((2, len(self.slots)), -1)
        self.users = np.zeros(len(self.slots), dtype=np.int64)
        """How many forwards compute with what is in each slot, or wait for it: counted for many slots at once."""

    def __getitem__(self, number: int) -> ExpertSlot:
        return self.slots[number]

    def is_used(self, slot: ExpertSlot) -> bool:
        return bool(self.users[slot.number])

    @property
    def free(self) -> int:
        """How many slots nobody uses."""
        return int(np.count_nonzero(self.users == 0))

    def overwritable(self, count: int, keep: Iterable[ExpertSlot], later: Iterable[Key]) -> list[ExpertSlot] | None:
        """Return `count` slots to overwrite, None if there are not so many.

        Args:
            count: How many.
            keep: Slots that are not to be overwritten, beside those in use.
            later: Experts whose slots are overwritten last of all.
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
        """Note for the policy that an expert lies in `slot`."""
        self._contents[:, slot.number] = key

    def forget(self, slot: ExpertSlot) -> None:
        super().forget(slot)
        self._contents[:, slot.number] = -1
