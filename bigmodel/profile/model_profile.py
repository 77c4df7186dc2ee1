"""What a model needs, as one value: bytes of every unit, KV cache, and the activations of every phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .model.units import UnitProfile
from .trace.dry_run import Phase
from .trace.ledger import D, replay
from .trace.workload import Workload


@dataclass(frozen=True)
class Profile:
    """What a model needs to run at given shapes.

    Attributes:
        name: class of the model.
        units: its pieces in the order they run; what does not run by itself stands before what follows it.
        workload: the shapes.
        phases: the recorded forwards; empty if they are not known.
        dtype: what floating point weights are cast to when loaded; None if they stay as they are.
        max_context: tokens the model allows; None if it does not say.
        first: position of the unit that holds the model's first parameter: `transformers` takes its device for the
            model's, and `generate` brings the inputs there.
        offload_dtype: what weights are quantised to that are streamed to an accelerator; None for not at all.
    """

    name: str
    units: tuple[UnitProfile, ...]
    workload: Workload
    phases: tuple[Phase, ...]
    dtype: str | None = None
    max_context: int | None = None
    first: int = 0
    offload_dtype: str | None = None

    @cached_property
    def weights(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(n for n, is_buffer in self._storages.values() if not is_buffer)

    @cached_property
    def buffers(self) -> int:
        """Bytes of all buffers."""
        return sum(n for n, is_buffer in self._storages.values() if is_buffer)

    @cached_property
    def _storages(self) -> dict[int, tuple[int, bool]]:
        found: dict[int, tuple[int, bool]] = {}
        for unit in self.units:
            for storage, spec in unit.storages.items():
                nbytes, is_buffer = found.get(storage, (spec.nbytes, True))
                found[storage] = nbytes, is_buffer and spec.is_buffer
        return found

    @cached_property
    def kv_cache(self) -> tuple[int, ...]:
        """Bytes of cache each unit holds when the context is full."""
        if not self.phases or self.phases[-1].name == "forward":
            return (0,) * len(self.units)
        alive = self.phases[-1].trace.left_alive()
        return tuple(alive.get(index, 0) for index in range(len(self.units)))

    @cached_property
    def activations(self) -> int:
        """Most bytes of activations alive at once, beside the final KV cache, when everything runs on one device."""
        return self.dynamic_peaks({}, main=None)[None] - sum(self.kv_cache)

    def dynamic_peaks(
        self,
        runs_on: Mapping[int, D],
        main: D,
        rounding: Callable[[int], int] = int,
        brought_to: D | None = None,
        experts: Mapping[tuple[int, int], int] | None = None,
    ) -> dict[D, int]:
        """Return the most bytes of activations and KV cache alive at once on each device, over all phases.

        Args:
            runs_on: device of each unit by its position; units left out run on `main`.
            main: where inputs are.
            rounding: what the allocator makes of a number of bytes.
            brought_to: where the weights of unit `first` lie; None: on `main`.
            experts: for how many experts there is room, where they come one by one: by unit and their position in it.
        """
        peaks: dict[D, int] = {main: 0}
        for phase in self.phases:
            trace = phase.trace_from(brought_to)
            for device, peak in replay(trace, runs_on, main, rounding, brought_to, experts).peak.items():
                peaks[device] = max(peaks.get(device, 0), peak)
        return peaks
