"""Units that share a tensor are placed together, and their shared bytes are counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...profile import UnitProfile


@dataclass(frozen=True)
class Group:
    """Units that must lie on one device because they share tensors; most groups are a single unit.

    Attributes:
        members: positions of the units in the list they came from, ascending.
        nbytes: bytes of all their tensors, each storage once.
        weights: the part of `nbytes` that is parameters.
    """

    members: tuple[int, ...]
    nbytes: int
    weights: int

    @property
    def buffers(self) -> int:
        """The part of `nbytes` that is buffers."""
        return self.nbytes - self.weights


def tie_groups(units: Sequence[UnitProfile]) -> list[Group]:
    """Join units that share a storage; the groups are in the order of their first units."""
    parent = list(range(len(units)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first_owner: dict[int, int] = {}
    for index, unit in enumerate(units):
        for storage in unit.storages:
            owner = first_owner.setdefault(storage, index)
            a, b = root(owner), root(index)
            parent[max(a, b)] = min(a, b)
    members: dict[int, list[int]] = {}
    for index in range(len(units)):
        members.setdefault(root(index), []).append(index)
    return [_group(units, tuple(indices)) for indices in members.values()]


def _group(units: Sequence[UnitProfile], members: tuple[int, ...]) -> Group:
    sizes: dict[int, tuple[int, bool]] = {}
    for index in members:
        for storage, spec in units[index].storages.items():
            known = sizes.get(storage)
            if known is None or (known[1] and not spec.is_buffer):
                sizes[storage] = (spec.nbytes, spec.is_buffer)
    weights = sum(nbytes for nbytes, is_buffer in sizes.values() if not is_buffer)
    return Group(members, sum(nbytes for nbytes, _ in sizes.values()), weights)
