"""The recording of a deep model from that of a few of its layers: what they do is repeated for those they stand for.

A deep model is a few layers over and over: which few stand for all.

A dry run of every layer of a 126-layer model would take seconds; the layers of one kind do the same thing each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..model.units import UnitProfile
from .trace import Allocate, Call, Enter, Event, Free, Held, Leave, Return, Trace


class CannotRepeat(Exception):
    """The recording does not have the shape that repeating needs."""


def lengthen(trace: Trace, shortening: Shortening) -> Trace:
    """Return the trace of the full list from that of the shortened one.

    Raises:
        CannotRepeat: a block ran not exactly once or out of order, or layers of one kind left different things alive.
    """
    return _Lengthener(trace, shortening).run()


class _Lengthener:
    """Builds the long trace: head, the kept layers but the last, copies for the layers left out, tail."""

    def __init__(self, trace: Trace, shortening: Shortening) -> None:
        self.trace = trace
        self.cut = shortening
        self.numbers = itertools.count(1 + _highest(trace))
        self.events: list[Event] = []
        self.initial = list(trace.initial)
        self.copies: dict[int, list[int]] = {}  # storages of the copies of a layer's storage
        self.left: list[list[int]] = []  # by layer of the full list: its storages alive when the next begins
        self.own: dict[int, list[int]] = {}  # by layer of the full list: its storages alive before the trace

    def run(self) -> Trace:
        starts = self._starts()
        if not starts:
            self._hold()
            return Trace(self.trace.events, tuple(self.initial))
        kept = self.cut.kept
        events = self.trace.events
        segments = [events[starts[p] : starts[p + 1]] for p in range(kept - 1)]
        self.events += events[: starts[-1]]
        self.left += [_left_alive(segment) for segment in segments]
        self._hold()
        for layer in range(kept - 1, len(self.cut.twins) - 1):
            self._copy(segments[self.cut.twins[layer]], layer)
        self._tail(events[starts[-1] :])
        return Trace(tuple(self.events), tuple(self.initial))

    def _starts(self) -> list[int]:
        kept_units = self.cut.units[: self.cut.kept]
        entries = [(i, e.unit) for i, e in enumerate(self.trace.events) if isinstance(e, Enter)]
        starts = [(i, unit) for i, unit in entries if unit in kept_units]
        if starts and [unit for _, unit in starts] != list(kept_units):
            raise CannotRepeat(f"the blocks of {self.cut.path} do not run once each, in order")
        return [i for i, _ in starts]

    def _hold(self) -> None:
        """Give the layers left out their share of what is alive before the trace."""
        by_unit: dict[int, list[Held]] = {}
        for held in self.trace.initial:
            by_unit.setdefault(held.unit, []).append(held)
        last = len(self.cut.twins) - 1
        for layer, twin in enumerate(self.cut.twins):
            originals = by_unit.get(self.cut.units[twin], [])
            if layer < self.cut.kept - 1:
                self.own[layer] = [held.storage for held in originals]
            elif layer < last:
                copies = [replace(h, storage=next(self.numbers), unit=self.cut.units[layer]) for h in originals]
                self.initial += copies
                self.own[layer] = [held.storage for held in copies]
        stand_in = self.cut.units[self.cut.kept - 1]
        self.initial = [
            replace(h, unit=self.cut.units[last]) if h in self.trace.initial and h.unit == stand_in else h
            for h in self.initial
        ]

    def _copy(self, segment: Sequence[Event], layer: int) -> None:
        """Append what `layer` does: what its twin did, with storages of its own."""
        twin = self.cut.twins[layer]
        names = dict(zip(self.own[twin], self.own[layer], strict=True))
        for back in range(1, CONTEXT + 1):
            there, here = self.left[twin - back], self.left[layer - back]
            if len(there) != len(here):
                raise CannotRepeat(f"equal blocks of {self.cut.path} leave different things behind")
            names.update(zip(there, here, strict=True))
            names.update(zip(self.own[twin - back], self.own[layer - back], strict=True))
        units = {self.cut.units[twin]: self.cut.units[layer]}
        for event in segment:
            if isinstance(event, Allocate):
                names[event.storage] = next(self.numbers)
                self.copies.setdefault(event.storage, []).append(names[event.storage])
            if isinstance(event, Free) and event.storage not in names:
                raise CannotRepeat(f"a block of {self.cut.path} ends the life of what was made far before it")
            self.events.append(renamed(event, names, units))
        self.left.append([names[storage] for storage in self.left[twin]])

    def _tail(self, tail: Sequence[Event]) -> None:
        """Append the last layer and what follows; it sees the last copies where it saw the last kept layers."""
        kept, total = self.cut.kept, len(self.cut.twins)
        names: dict[int, int] = {}
        for back in range(CONTEXT, 0, -1):
            names.update(zip(self.left[kept - 1 - back], self.left[total - 1 - back], strict=True))
        units = {self.cut.units[kept - 1]: self.cut.units[-1]}
        dead = {event.storage for event in self.events if isinstance(event, Free)}
        for event in tail:
            if not isinstance(event, Free):
                self.events.append(renamed(event, names, units))
                continue
            family = {event.storage, names.get(event.storage, event.storage)}
            family.update(self.copies.get(event.storage, ()))
            self.events += [Free(storage) for storage in sorted(family - dead)]
            dead |= family


def _highest(trace: Trace) -> int:
    made = [event.storage for event in trace.events if isinstance(event, Allocate)]
    return max([held.storage for held in trace.initial] + made, default=0)


def _left_alive(segment: Sequence[Event]) -> list[int]:
    """Return the storages that a segment makes and leaves alive, in the order they were made."""
    alive = dict.fromkeys(event.storage for event in segment if isinstance(event, Allocate))
    for event in segment:
        if isinstance(event, Free):
            alive.pop(event.storage, None)
    return list(alive)


def renamed(event: Event, names: Mapping[int, int], units: Mapping[int, int]) -> Event:
    """Return `event` with storages and units called what `names` and `units` say, others as they are."""
    if isinstance(event, Allocate):
        source = names.get(event.source, event.source)
        return Allocate(names.get(event.storage, event.storage), event.nbytes, source, _named(event.others, names))
    if isinstance(event, Free):
        return Free(names.get(event.storage, event.storage))
    if isinstance(event, Enter):
        return Enter(units.get(event.unit, event.unit), _named(event.inputs, names))
    if isinstance(event, Leave):
        return Leave(units.get(event.unit, event.unit), _named(event.outputs, names))
    if isinstance(event, Call):
        return Call(_named(event.fresh, names), event.kept)
    if isinstance(event, Return):
        given = frozenset(names.get(storage, storage) for storage in event.given)
        return Return(_named(event.outputs, names), given)
    return event


def _named(tensors: tuple[tuple[int, int], ...], names: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((names.get(storage, storage), nbytes) for storage, nbytes in tensors)


CONTEXT = 2
"""How many layers before a layer must be of the same kinds for the layer to count as the same."""


@dataclass(frozen=True)
class Shortening:
    """How a list of blocks is cut.

    Attributes:
        path: name of the list in the model.
        units: unit index of each block of the full list.
        kept: how many blocks from the start are run; the last of them stands for the full list's last.
        twins: for each block of the full list, the position of the kept block that stands for it.
    """

    path: str
    units: tuple[int, ...]
    kept: int
    twins: tuple[int, ...]


def shorten(kinds: Sequence[object]) -> tuple[int, tuple[int, ...]] | None:
    """Return how many layers from the start stand for all, and which of these stands for each layer.

    A layer stands for another when both and the `CONTEXT` layers before them are of the same kinds. The last kept
    layer stands for the very last one.

    Args:
        kinds: one value per layer; equal values mean layers that do the same.

    Returns:
        None when nothing can be left out.
    """
    total = len(kinds)
    windows = [tuple(kinds[i - CONTEXT : i + 1]) for i in range(CONTEXT, total)]
    for kept in range(CONTEXT + 2, total):
        if windows[kept - 1 - CONTEXT] != windows[-1]:
            continue
        known = {window: CONTEXT + i for i, window in enumerate(windows[: kept - 1 - CONTEXT])}
        middle = windows[kept - 1 - CONTEXT : -1]
        if all(window in known for window in middle):
            return kept, (*range(kept - 1), *(known[window] for window in middle), kept - 1)
    return None


def kind_of(block: nn.Module) -> object:
    """Return a value that is equal for two blocks that do the same: classes, shapes and plain settings inside."""
    parts: list[object] = []
    for name, module in block.named_modules():
        tensors = [(k, t.shape, t.dtype) for k, t in {**module._parameters, **module._buffers}.items() if t is not None]
        settings = sorted(
            (k, v)
            for k, v in vars(module).items()
            if isinstance(v, (int, float, str, bool)) and k not in ("layer_idx", "layer_id", "layer_index")
        )
        parts.append((name, type(module), tuple(tensors), tuple(map(repr, settings))))
    return tuple(parts)


def find_shortenings(model: nn.Module, units: Sequence[UnitProfile]) -> list[Shortening]:
    """Return the lists of blocks of `model` that can be cut, and how."""
    number = {unit.name: index for index, unit in enumerate(units) if unit.is_block}
    found = []
    for path, module in model.named_modules():
        names = [f"{path}.{child}" if path else child for child in module._modules]
        if not isinstance(module, nn.ModuleList) or not all(name in number for name in names):
            continue
        cut = shorten([kind_of(block) for block in module])
        if cut is not None:
            found.append(Shortening(path, tuple(number[name] for name in names), *cut))
    return found
