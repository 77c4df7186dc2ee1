"""Dispatch units: the modules of a model that are streamed, or that receive their inputs, as a whole."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from ...errors import DeviceMapError
from ...profile import find_units
from ...profile.model.tensors import owner_of, with_ancestors
from .tensors import PlacedTensor


class DispatchUnit(NamedTuple):
    """A module, the names of its tensors that belong to this unit, and whether modules inside it are units too."""

    name: str
    tensors: list[str]
    encloses: bool


def find_dispatch_units(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    placed: Mapping[str, PlacedTensor],
    no_split_module_classes: Collection[str] | None = None,
) -> list[DispatchUnit]:
    """Split `model` into dispatch units: its profile units, each split further until all its tensors share a device.

    Args:
        model: The model.
        modules: Its modules by name.
        placed: Its tensors by name, with their devices.
        no_split_module_classes: Classes whose modules are never split; None detects them.
    """
    names = NameTree(placed)
    found: list[DispatchUnit] = []
    direct: dict[str, list[str]] = defaultdict(list)
    for unit in find_units(model, no_split_module_classes):
        if unit.is_tensor:
            direct[unit.name.rpartition(".")[0]].append(unit.name)
        else:
            found.extend(_split_if_mixed(unit.name, modules, placed, names))
    found.extend(DispatchUnit(owner, own, True) for owner, own in direct.items())
    return found


def dispatch_units_of_parts(
    parts: Collection[str], modules: Mapping[str, nn.Module], tensors: Iterable[str]
) -> list[DispatchUnit]:
    """Return the dispatch units of a plan: for each part, its tensors that belong to no smaller part.

    Args:
        parts: Names of modules and tensors, in the order in which they run.
        modules: The model's modules by name.
        tensors: Names of its tensors.

    Raises:
        DeviceMapError: A tensor belongs to no part, so the plan is of another model.
    """
    inside: dict[str, list[str]] = {part: [] for part in parts}
    for name in tensors:
        owner = owner_of(name, inside)
        if owner is None:
            raise DeviceMapError(f"the plan has no part for {name!r}: it is of another model; make a plan of this one")
        inside[owner].append(name)
    enclosing = {outer for part in parts for outer in with_ancestors(part) if outer != part}
    found = [DispatchUnit(name, own, name in enclosing) for name, own in inside.items() if name in modules]
    direct: dict[str, list[str]] = defaultdict(list)
    for name in inside:
        if name not in modules:
            direct[name.rpartition(".")[0]].append(name)
    return [*found, *(DispatchUnit(owner, own, True) for owner, own in direct.items())]


def _split_if_mixed(
    name: str, modules: Mapping[str, nn.Module], placed: Mapping[str, PlacedTensor], names: NameTree
) -> Iterator[DispatchUnit]:
    """Yield a module as one unit if the map puts it on one device; else its own tensors, and then its children."""
    inside = names.inside(name)
    # Weights in RAM and on disk can be streamed together.
    if len({placed[n].place for n in inside}) <= 1:
        yield DispatchUnit(name, inside, False)
        return
    children = [child for child, module in modules[name]._modules.items() if module is not None]
    own = names.own(name)
    if own:
        yield DispatchUnit(name, own, bool(children))
    for child in children:
        yield from _split_if_mixed(f"{name}.{child}" if name else child, modules, placed, names)


class NameTree:
    """Finds the tensors inside a module in time that does not grow with the model."""

    def __init__(self, names: Collection[str]) -> None:
        self._order = {name: position for position, name in enumerate(names)}
        self._sorted = sorted(names)

    def inside(self, module: str) -> list[str]:
        """Return the names of all tensors in `module`, in the model's order."""
        if not module:
            return list(self._order)
        # "/" is the character after ".", so all names that begin with "MODULE." sort between the two.
        first, end = bisect_left(self._sorted, f"{module}."), bisect_left(self._sorted, f"{module}/")
        return sorted(self._sorted[first:end], key=self._order.__getitem__)

    def own(self, module: str) -> list[str]:
        """Return the names of the tensors directly in `module`, not in its children."""
        start = len(module) + 1 if module else 0
        return [name for name in self.inside(module) if "." not in name[start:]]
