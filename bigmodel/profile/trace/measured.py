"""The activations of a forward that ran for real, for a model that no dry run succeeds with.

A dry run records every allocation of a forward. Of a forward that ran for real only the peak is known; as a `Phase` it
is planned with like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..model.units import UnitProfile
from .dry_run import Phase
from .events import Allocate, Enter, Event, Free, Leave
from .inputs import InputSizes
from .trace import Trace


@dataclass(frozen=True)
class MeasuredForward:
    """The activations of one forward, inputs included, on the one device that all of it ran on.

    Attributes:
        peak: most bytes that were alive at once.
        units: names of the units that were seen to run, in the order in which they first ended.
        inputs: sizes of its arguments; None: not known.
    """

    peak: int
    units: tuple[str, ...] = ()
    inputs: InputSizes | None = None

    def phase(self, units: Sequence[UnitProfile], tokens: int) -> Phase:
        """Return the forward as a phase, in which the peak counts on the main device and on each that runs a unit:
        all that is alive on one of several devices would be alive on a single one, too.

        Args:
            units: the units of the model; events name them by their position.
            tokens: tokens of each sequence that it processed.
        """
        positions = {unit.name: index for index, unit in enumerate(units)}
        inputs = () if self.inputs is None else (self.inputs,)
        ran = [positions[name] for name in self.units if name in positions]
        return Phase("forward", Trace(tuple(self._events(ran))), tokens, inputs=inputs)

    def _events(self, ran: Sequence[int]) -> Iterator[Event]:
        for number, unit in enumerate(ran):
            yield from (Enter(unit), Allocate(number, self.peak), Free(number), Leave(unit))
        yield from (Allocate(len(ran), self.peak), Free(len(ran)))
