"""Storage and execution device of every unit of a model: the result of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...devices import HOST
from ...limits import STAGING_BYTES
from ...profile import Profile
from ..result.budgets import Key, is_accelerator

STEP = "decode"
"""Name of the phase that is a step of generation."""


@dataclass(frozen=True)
class Assignment:
    """Storage and execution device of every unit of a profile, by position.

    Attributes:
        storage: device key on which each unit lies.
        execution: device key on which each unit runs.
        main: where inputs are, and where streamed units run.
        slots: how many slots there are on `main`.
        slot_bytes: bytes of one slot.
        stream_buffers: buffers of a unit lie with its weights, and not where it runs.
        expert_cache: bytes of each device that experts fetched one by one may take; None: what streaming whole units
            of them would take.
        staging_bytes: bytes of the host through which units on disk reach an accelerator, at most.
        computed_below: for units that are streamed to `main` for prompts and computed on the host in steps of
            generation, by position: calls of fewer tokens than this are computed. Their buffers lie with their weights.
    """

    storage: tuple[Key, ...]
    execution: tuple[Key, ...]
    main: Key
    slots: int = 0
    slot_bytes: int = 0
    stream_buffers: bool = False
    expert_cache: int | None = None
    staging_bytes: int = STAGING_BYTES
    computed_below: Mapping[int, int] = field(default_factory=dict)

    def in_steps(self) -> Assignment:
        """Return the assignment during a step of generation."""
        if not self.computed_below:
            return self
        execution = tuple(HOST if index in self.computed_below else key for index, key in enumerate(self.execution))
        return replace(self, execution=execution, computed_below={})

    def streamed(self, index: int) -> bool:
        """Whether unit `index` is copied to an accelerator each time it runs."""
        return is_accelerator(self.execution[index]) and not is_accelerator(self.storage[index])


def host_only(profile: Profile) -> Assignment:
    """Return the assignment in which the CPU holds and runs everything."""
    everywhere = (HOST,) * len(profile.units)
    return Assignment(everywhere, everywhere, HOST)
