"""Extrapolates the trace of a deep model from that of its first few layers.

A dry run of every layer of a 126-layer model would take seconds, and layers of one kind all do the same. So only a
sample of the layers is run (`sample_layers`), and `extrapolate` repeats what the sampled ones did for the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..model.units import UnitProfile
from .trace import (
    Allocate,
    Call,
    Enter,
    Event,
    Free,
    InitialStorage,
    Leave,
    Operation,
    OutsideUse,
    Return,
    Scratch,
    Trace,
)

CONTEXT = 2
"""Layers before a layer that must be of the same kinds for two layers to count as the same: storages of one layer may
be freed by the next ones."""


class CannotExtrapolate(Exception):
    """The recorded trace does not repeat layer by layer."""


@dataclass(frozen=True)
class LayerSample:
    """A list of blocks and the few of them that stand for all.

    Attributes:
        path: name of the list in the model.
        units: unit index of each block of the full list.
        count: blocks from the start that are run; the last of them stands for the full list's last.
        stand_ins: for each block of the full list, the position of the run block that stands for it.
    """

    path: str
    units: tuple[int, ...]
    count: int
    stand_ins: tuple[int, ...]

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of the list in `model`: all of them, or the sampled ones of a clone."""
        return list(model.get_submodule(self.path).children())

    def refuse_gathered(self, gathered: Iterable[Collection[int]]) -> None:
        """Raise CannotExtrapolate if one operation reads what many of the blocks have made, as one that stacks their
        outputs: what it makes grows with the number of blocks.

        Args:
            gathered: for each operation, the recorded units whose results it reads.
        """
        sampled = set(self.units[: self.count])
        if any(len(sampled.intersection(units)) > CONTEXT for units in gathered):
            raise CannotExtrapolate(f"what the blocks of {self.path} make is gathered by one operation")

    def extended(self, units: Collection[int]) -> frozenset[int]:
        """Return recorded units together with those that they stand for."""
        layers = {unit for unit, by in zip(self.units, self.stand_ins, strict=True) if self.units[by] in units}
        return frozenset(units).difference(self.units[: self.count]) | layers


def find_layer_samples(model: nn.Module, units: Sequence[UnitProfile]) -> list[LayerSample]:
    """Return a sample of each list of blocks of `model` that is long enough for one."""
    number = {unit.name: index for index, unit in enumerate(units) if unit.is_block}
    found = []
    for path, module in model.named_modules():
        names = [f"{path}.{child}" if path else child for child in module._modules]
        if not isinstance(module, nn.ModuleList) or not all(name in number for name in names):
            continue
        sampled = sample_layers([block_signature(block) for block in module])
        if sampled is not None:
            found.append(LayerSample(path, tuple(number[name] for name in names), *sampled))
    return found


def sample_layers(signatures: Sequence[object]) -> tuple[int, tuple[int, ...]] | None:
    """Return how many layers from the start stand for all, and which of these stands for each layer.

    A layer stands for another when both and the `CONTEXT` layers before them have the same signatures. The last
    sampled layer stands for the very last one.

    Args:
        signatures: one value per layer; equal values mean layers that do the same.

    Returns:
        None when no layer can be left out.
    """
    total = len(signatures)
    windows = [tuple(signatures[i - CONTEXT : i + 1]) for i in range(CONTEXT, total)]
    for count in range(CONTEXT + 2, total):
        if windows[count - 1 - CONTEXT] != windows[-1]:
            continue
        known = {window: CONTEXT + i for i, window in enumerate(windows[: count - 1 - CONTEXT])}
        middle = windows[count - 1 - CONTEXT : -1]
        if all(window in known for window in middle):
            return count, (*range(count - 1), *(known[window] for window in middle), count - 1)
    return None


def block_signature(block: nn.Module) -> object:
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


def extrapolate(trace: Trace, sample: LayerSample) -> Trace:
    """Return the trace of the full list of blocks from that of the sampled ones.

    Raises:
        CannotExtrapolate: a block ran not exactly once or out of order, or layers of one kind left different storages
            alive.
    """
    return _Extrapolation(trace, sample).run()


class _Extrapolation:
    """Builds the full trace: head, the sampled layers but the last, copies for the others, tail."""

    def __init__(self, trace: Trace, sample: LayerSample) -> None:
        self.trace = trace
        self.sample = sample
        self.numbers = itertools.count(1 + _highest_storage(trace))
        self.events: list[Event] = []
        self.initial = list(trace.initial)
        self.copies: dict[int, list[int]] = {}  # storages of the copies of a layer's storage
        self.left: list[list[int]] = []  # by layer of the full list: its storages alive when the next begins
        self.own: dict[int, list[int]] = {}  # by layer of the full list: its storages alive before the trace

    def run(self) -> Trace:
        starts = self._starts()
        if not starts:
            self._extend_initial()
            return Trace(self.trace.events, tuple(self.initial))
        count = self.sample.count
        events = self.trace.events
        segments = [events[starts[p] : starts[p + 1]] for p in range(count - 1)]
        self.events += events[: starts[-1]]
        self.left += [_left_alive(segment) for segment in segments]
        self._extend_initial()
        for layer in range(count - 1, len(self.sample.stand_ins) - 1):
            self._copy(segments[self.sample.stand_ins[layer]], layer)
        self._append_tail(events[starts[-1] :])
        return Trace(tuple(self.events), tuple(self.initial))

    def _starts(self) -> list[int]:
        """Return the position of the event at which each sampled layer starts; none if the list does not run."""
        sampled = self.sample.units[: self.sample.count]
        entries = [(i, e.unit) for i, e in enumerate(self.trace.events) if isinstance(e, Enter)]
        starts = [(i, unit) for i, unit in entries if unit in sampled]
        if starts and [unit for _, unit in starts] != list(sampled):
            raise CannotExtrapolate(f"the blocks of {self.sample.path} do not run once each, in order")
        return [i for i, _ in starts]

    def _extend_initial(self) -> None:
        """Give each layer that was not run its own initial storages, like those of the layer that stands for it."""
        by_unit: dict[int, list[InitialStorage]] = {}
        for item in self.trace.initial:
            by_unit.setdefault(item.unit, []).append(item)
        last = len(self.sample.stand_ins) - 1
        for layer, stand_in in enumerate(self.sample.stand_ins):
            originals = by_unit.get(self.sample.units[stand_in], [])
            if layer < self.sample.count - 1:
                self.own[layer] = [item.storage for item in originals]
            elif layer < last:
                unit = self.sample.units[layer]
                copies = [replace(item, storage=next(self.numbers), unit=unit) for item in originals]
                self.initial += copies
                self.own[layer] = [item.storage for item in copies]
        last_sampled = self.sample.units[self.sample.count - 1]
        self.initial = [
            replace(item, unit=self.sample.units[last])
            if item in self.trace.initial and item.unit == last_sampled
            else item
            for item in self.initial
        ]

    def _copy(self, segment: Sequence[Event], layer: int) -> None:
        """Append the events of `layer`: those of its stand-in, with storages of its own."""
        stand_in = self.sample.stand_ins[layer]
        names = dict(zip(self.own[stand_in], self.own[layer], strict=True))
        for back in range(1, CONTEXT + 1):
            there, here = self.left[stand_in - back], self.left[layer - back]
            if len(there) != len(here):
                raise CannotExtrapolate(f"equal blocks of {self.sample.path} leave different storages alive")
            names.update(zip(there, here, strict=True))
            names.update(zip(self.own[stand_in - back], self.own[layer - back], strict=True))
        units = {self.sample.units[stand_in]: self.sample.units[layer]}
        for event in segment:
            if isinstance(event, Allocate):
                names[event.storage] = next(self.numbers)
                self.copies.setdefault(event.storage, []).append(names[event.storage])
            if isinstance(event, Free) and event.storage not in names:
                raise CannotExtrapolate(f"a block of {self.sample.path} frees what was allocated far before it")
            self.events.append(renamed(event, names, units))
        self.left.append([names[storage] for storage in self.left[stand_in]])

    def _append_tail(self, tail: Sequence[Event]) -> None:
        """Append the last layer and what follows; it refers to the last copies in place of the last sampled layers."""
        count, total = self.sample.count, len(self.sample.stand_ins)
        names: dict[int, int] = {}
        for back in range(CONTEXT, 0, -1):
            names.update(zip(self.left[count - 1 - back], self.left[total - 1 - back], strict=True))
        units = {self.sample.units[count - 1]: self.sample.units[-1]}
        dead = {event.storage for event in self.events if isinstance(event, Free)}
        for event in tail:
            if not isinstance(event, Free):
                self.events.append(renamed(event, names, units))
                continue
            family = {event.storage, names.get(event.storage, event.storage)}
            family.update(self.copies.get(event.storage, ()))
            self.events += [Free(storage) for storage in sorted(family - dead)]
            dead |= family


def _highest_storage(trace: Trace) -> int:
    made = [event.storage for event in trace.events if isinstance(event, Allocate)]
    return max([item.storage for item in trace.initial] + made, default=0)


def _left_alive(segment: Sequence[Event]) -> list[int]:
    """Return the storages that a segment allocates and leaves alive, in the order of allocation."""
    alive = dict.fromkeys(event.storage for event in segment if isinstance(event, Allocate))
    for event in segment:
        if isinstance(event, Free):
            alive.pop(event.storage, None)
    return list(alive)


def renamed(event: Event, names: Mapping[int, int], units: Mapping[int, int]) -> Event:
    """Return `event` with its storages and units renumbered by `names` and `units`; those in neither stay."""
    kind = type(event)
    if kind is Operation or kind is Scratch:
        return event
    if not names and (kind is Free or kind is Call or kind is Return):
        return event
    if isinstance(event, Allocate):
        if not names and event.brought_to is None and event.view_of is None and not event.weights:
            return event
        source = names.get(event.source, event.source)
        to = None if event.brought_to is None else units.get(event.brought_to, event.brought_to)
        view_of = None if event.view_of is None else units.get(event.view_of, event.view_of)
        made_of = tuple(units.get(unit, unit) for unit in event.weights)
        storage = names.get(event.storage, event.storage)
        return Allocate(storage, event.nbytes, source, _named(event.others, names), to, made_of, view_of)
    if isinstance(event, Free):
        return Free(names.get(event.storage, event.storage))
    if isinstance(event, OutsideUse):
        weights = tuple((units.get(unit, unit), nbytes) for unit, nbytes in event.weights)
        alone = tuple(units.get(unit, unit) for unit in event.alone)
        return OutsideUse(weights, names.get(event.source, event.source), alone, event.lasts)
    if isinstance(event, Enter):
        return Enter(units.get(event.unit, event.unit), _named(event.inputs, names))
    if isinstance(event, Leave):
        back_to = None if event.source is None else names.get(event.source, event.source)
        return Leave(units.get(event.unit, event.unit), _named(event.outputs, names), back_to)
    if isinstance(event, Call):
        return Call(_named(event.fresh, names), _named(event.kept, names))
    if isinstance(event, Return):
        given = frozenset(names.get(storage, storage) for storage in event.given)
        return Return(_named(event.outputs, names), given)
    return event


def _named(tensors: tuple[tuple[int, int], ...], names: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((names.get(storage, storage), nbytes) for storage, nbytes in tensors)
