"""What a unit is called with is brought to where it runs from wherever it was made: how many bytes cross which link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...devices import HOST
from ...profile.trace.trace import OUTSIDE, Allocate, Enter, Leave, Trace
from ..result.budgets import Key

Maker = tuple[int, bool]
"""The unit that made something, and whether it is given back to the module around that unit."""

NOBODY: Maker = (OUTSIDE, False)


@dataclass(frozen=True)
class Inputs:
    """What a unit is called with that one other made.

    Attributes:
        maker: position of the unit that made it; `OUTSIDE`: what is between units, and on the main device.
        tensors: how many tensors.
        nbytes: bytes of them all.
        given_back: it is brought to the main device if it was made on the host.
    """

    maker: int
    tensors: int
    nbytes: int
    given_back: bool = False


class Crossings:
    """What the units of a trace are called with, and where that is under an assignment.

    Args:
        trace: one forward.
    """

    def __init__(self, trace: Trace) -> None:
        self._inputs: dict[int, tuple[Inputs, ...]] = {}
        makers = {held.storage: (held.unit, False) for held in trace.initial}
        running = [OUTSIDE]
        for event in trace.events:
            if isinstance(event, Allocate):
                outside = running[-1] == OUTSIDE
                makers[event.storage] = makers.get(event.source, NOBODY) if outside else (running[-1], False)
            elif isinstance(event, Enter):
                self._inputs.setdefault(event.unit, _by_maker(event, makers))
                running.append(event.unit)
            elif isinstance(event, Leave):
                running.pop()
                made = (storage for storage, _ in event.outputs if makers.get(storage) == (event.unit, False))
                makers.update(dict.fromkeys(made, (event.unit, True)))

    def from_elsewhere(self, unit: int, runs: Sequence[Key], main: Key) -> list[tuple[Key, Inputs]]:
        """Return what `unit` is called with that lies on other devices than it runs on, with these devices.

        Args:
            unit: position of the unit.
            runs: where each unit runs.
            main: where the model's own inputs are, and outputs of units on the host that are given back to it.
        """
        found = []
        for inputs in self._inputs.get(unit, ()):
            lies = main if inputs.maker == OUTSIDE else runs[inputs.maker]
            if lies == HOST and inputs.given_back:
                lies = main
            if lies != runs[unit]:
                found.append((lies, inputs))
        return found


def _by_maker(event: Enter, makers: Mapping[int, Maker]) -> tuple[Inputs, ...]:
    sizes: dict[Maker, list[int]] = {}
    for storage, nbytes in event.inputs:
        sizes.setdefault(makers.get(storage, NOBODY), []).append(nbytes)
    return tuple(Inputs(unit, len(found), sum(found), back) for (unit, back), found in sizes.items())
