"""Views of a slot that a forward keeps: in containers that it is given, and in attributes of its modules.

The slot's next content would overwrite what they show. They are replaced by copies, as those in the output are; a
weight itself by the one on the host.

What a module holds may be large, as a data set is. Where nothing tells that a forward has kept something, only so many
members are looked at (`MOST_MEMBERS`), those of outer containers first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...devices.nested import map_leaves

_OF_MODULES = frozenset(vars(nn.Module()))
_OWN = ("bigmodel", "torch", "builtins")
"""Packages whose objects are not looked into, modules apart."""

MOST_MEMBERS = 10_000
"""Members that are looked at where a forward is not known to have kept something: some milliseconds."""

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Classes of which containers are passed over if they hold nothing else."""

_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, nn.Module)
"""Values that are not looked into; modules are looked into only as holders."""


def replace_kept(
    holders: Iterable[object],
    replaced: Callable[[torch.Tensor], torch.Tensor],
    skipped: Collection[int] = (),
    most: int | None = None,
) -> bool:
    """Replace tensors in lists, dicts, tuples, attributes of modules and of other objects; return whether there were
    any to replace.

    Args:
        holders: Where to look. Parameters, buffers and children of modules are left alone.
        replaced: Returns what takes the place of a tensor: itself, where it stays.
        skipped: Objects that are not looked into, by id.
        most: Members that are looked at; those with more than are left of these are passed over. None: all.
    """
    waiting, seen, found = deque(holders), set(skipped), False
    left = math.inf if most is None else most
    while waiting:
        holder = waiting.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        size = _size(holder)
        if size > left or _holds_plain(holder):
            continue
        left -= size
        if isinstance(holder, tuple):
            waiting += [value for value in holder if not isinstance(value, _LEAVES)]
            continue
        for key, value, put in _members(holder):
            if isinstance(value, (torch.Tensor, tuple)) and id(value) not in skipped:
                new = map_leaves(lambda leaf: replaced(leaf) if _is_tensor(leaf) else leaf, value, is_leaf=_is_kept)
                if new is not value:
                    put(key, new)
                    found = True
            if not isinstance(value, _LEAVES):
                waiting.append(value)
    return found


def _size(holder: object) -> int:
    """Return how many members an object has that would be looked at."""
    if isinstance(holder, (list, deque, dict, tuple)):
        return len(holder)
    attributes = getattr(holder, "__dict__", None) if isinstance(holder, nn.Module) or _is_looked_into(holder) else None
    return len(attributes) if type(attributes) is dict else 0


def _holds_plain(holder: object) -> bool:
    """Whether a container holds nothing but plain values."""
    if isinstance(holder, dict):
        return _PLAIN.issuperset(map(type, dict.values(holder)))
    return isinstance(holder, (list, deque, tuple)) and _PLAIN.issuperset(map(type, holder))


def _is_looked_into(holder: object) -> bool:
    """Whether the attributes of an object, which is neither a container nor a module, are looked at."""
    return type(holder).__module__.partition(".")[0] not in _OWN


def _members(holder: object) -> Iterator[tuple[Any, Any, Callable[[Any, Any], None]]]:
    """Yield what an object holds: the key of each, and how another takes its place."""
    if isinstance(holder, (list, deque)):
        for index, value in enumerate(list(holder)):
            yield index, value, holder.__setitem__
    elif isinstance(holder, dict):
        for key, value in list(dict.items(holder)):
            yield key, value, holder.__setitem__
    elif isinstance(holder, nn.Module):
        for key, value in list(vars(holder).items()):
            if key not in _OF_MODULES:
                yield key, value, vars(holder).__setitem__
    elif _is_looked_into(holder):
        attributes = getattr(holder, "__dict__", None)
        if type(attributes) is dict:  # that of a class can only be read
            for key, value in list(attributes.items()):
                yield key, value, attributes.__setitem__


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_kept(value: object) -> bool:
    """Whether a member of a tuple is not rebuilt with it."""
    return not isinstance(value, tuple)
