"""What a dry run records of a model or of a sample of its layers, and recordings that equal models share.

Models that differ only in their number of layers, such as the stages of one model over nodes, may share a recording:
the sampled layers do the same, and only the number of their repetitions differs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from .inputs import InputSizes
from .trace import Trace, renamed

SHARED: ContextVar[dict[Hashable, Recording] | None] = ContextVar("shared_recordings", default=None)
"""The recordings that are shared now, by what they depend on; None: none are."""


@dataclass(frozen=True)
class Recording:
    """What one use of a clone has recorded.

    Attributes:
        units: positions of the clone's units in the whole model, ascending; events name units by these.
        marks: name and tokens of each trace.
        traces: the forwards, of the clone's layers.
        combined: as `Recorder.combined`.
        lent: as `Recorder.lent`.
        gathered: units whose results an operation reads, of each operation that reads those of several.
        grows: as `Session.grows`.
        inputs: as `Session.inputs`.
    """

    units: tuple[int, ...]
    marks: tuple[tuple[str, int], ...]
    traces: tuple[Trace, ...]
    combined: frozenset[int]
    lent: frozenset[int]
    gathered: tuple[frozenset[int], ...]
    grows: bool
    inputs: tuple[InputSizes, ...]

    def of_units(self, units: tuple[int, ...]) -> Recording:
        """Return the recording of an equal clone whose units are at other positions.

        Args:
            units: as many as its own, in the same order.
        """
        if units == self.units:
            return self
        names = dict(zip(self.units, units, strict=True))

        def each(numbers: frozenset[int]) -> frozenset[int]:
            return frozenset(names.get(number, number) for number in numbers)

        def of(trace: Trace) -> Trace:
            initial = (replace(held, unit=names.get(held.unit, held.unit)) for held in trace.initial)
            return Trace((renamed(event, {}, names) for event in trace.events), initial)

        gathered = tuple(map(each, self.gathered))
        traces = tuple(map(of, self.traces))
        return replace(
            self, units=units, traces=traces, combined=each(self.combined), lent=each(self.lent), gathered=gathered
        )


@contextmanager
def sharing_recordings() -> Iterator[None]:
    """Share recordings among the dry runs within the context, for equal models that are loaded with equal dtypes."""
    token = SHARED.set({})
    try:
        yield
    finally:
        SHARED.reset(token)
