"""Bring what a module is called with to the device it runs on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from .nested import map_leaves, map_tensors
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
        tensor: A tensor, or lists, tuples, named tuples, mappings and dataclasses of them, nested to any depth; an
            object that has a ``to`` method of its own is asked to move itself; anything else is passed on.
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

    return map_leaves(send, tensor, is_leaf=_is_packed, skip_keys=skip)


def copied_out_of(value: Any, storage: int) -> Any:
    """Return `value` with a copy of every tensor in it that lies in the memory `storage` (see `storage_of`).

    A module may return one of its weights or a part of it, as tables of positions do.
    """

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if storage_of(tensor) == storage else tensor

    return copied(value) if isinstance(value, torch.Tensor) else map_tensors(copied, value)


def are_all_on(values: Iterable[Any], device: torch.device) -> bool:
    """Whether `values` are tensors on `device` and plain values only, so that there is nothing to send."""
    return all(value.device == device if isinstance(value, torch.Tensor) else _is_plain(value) for value in values)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _is_packed(value: Any) -> bool:
    """Whether `value` is a packed sequence: a named tuple, but with parts that must stay on the host."""
    return isinstance(value, PackedSequence)


def _moves_itself(value: Any) -> bool:
    return hasattr(value, "to") and not isinstance(value, (torch.nn.Module, type))
