"""Bring what a module is called with to the device it runs on."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from .storage import storage_of


def send_to_device(
    tensor: Any,
    device: int | str | torch.device,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> Any:
    """Return `tensor` with every tensor in it on `device`.

    Containers are rebuilt only where something in them moves: an argument that is already in place comes back as the
    same object.

    Args:
        tensor: A tensor, or lists, tuples, named tuples, mappings and dataclasses of them, nested as deep as you
            like; an object that has a ``to`` method of its own is asked to move itself; anything else is passed on.
        device: Where tensors go.
        non_blocking: Let a copy from pinned memory return before it is done.
        skip_keys: Keys of mappings whose values stay where they are.
    """
    skip = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    def send(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == target else leaf.to(target, non_blocking=non_blocking)
        return leaf.to(target) if _moves_itself(leaf) else leaf

    return _rebuilt(tensor, send, skip)


def copied_out_of(value: Any, storage: int) -> Any:
    """Return `value` with a copy of every tensor in it that lies in the memory `storage` (see `storage_of`).

    A module may return one of its weights, or a part of it, as tables of positions do.
    """

    if isinstance(value, torch.Tensor):
        return value.clone() if storage_of(value) == storage else value

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and storage_of(leaf) == storage else leaf

    return _rebuilt(value, copied, set())


def are_all_on(values: Iterable[Any], device: torch.device) -> bool:
    """Whether `values` are tensors on `device` and plain values only, so that there is nothing to send."""
    return all(value.device == device if isinstance(value, torch.Tensor) else _is_plain(value) for value in values)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _moves_itself(value: Any) -> bool:
    return hasattr(value, "to") and not isinstance(value, (torch.nn.Module, type))


def _rebuilt(value: Any, replace: Callable[[Any], Any], skip: set[str]) -> Any:
    """Return `value` with what `replace` makes of everything in it that is no container; as it is if nothing changes.

    A packed sequence is a tuple, but knows itself which of its parts may move.
    """
    if _is_plain(value):
        return value
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return replace(value)
    if isinstance(value, (list, tuple)):
        return _rebuilt_sequence(value, replace, skip)
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, replace, skip)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _rebuilt_dataclass(value, replace, skip)
    return replace(value)


def _rebuilt_sequence(value: Any, replace: Callable[[Any], Any], skip: set[str]) -> Any:
    moved = [_rebuilt(item, replace, skip) for item in value]
    if all(new is old for new, old in zip(moved, value)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*moved)
    return type(value)(moved)


def _rebuilt_mapping(value: Mapping[Any, Any], replace: Callable[[Any], Any], skip: set[str]) -> Any:
    moved = {key: item if key in skip else _rebuilt(item, replace, skip) for key, item in value.items()}
    if all(moved[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        return moved
    clone = copy.copy(value)
    for key, item in moved.items():
        if item is not value[key]:
            clone[key] = item  # type: ignore[index]
    return clone


def _rebuilt_dataclass(value: Any, replace: Callable[[Any], Any], skip: set[str]) -> Any:
    changes = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = old if field.name in skip else _rebuilt(old, replace, skip)
        if new is not old:
            changes[field.name] = new
    if not changes:
        return value
    clone = copy.copy(value)
    for name, new in changes.items():
        object.__setattr__(clone, name, new)
    return clone


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor found in nested containers, None when there is none."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            found = first_tensor(item)
            if found is not None:
                return found
    return None
