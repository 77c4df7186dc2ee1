"""The rows of a batch: cutting the arguments of a call into those of fewer rows, and joining what the calls return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .nested import iter_leaves, map_tensors, open_container

Refusal = Callable[[str], Exception]
"""Returns the error for an output that cannot be joined, given what it is: "a tensor of shape (3,)"."""


def row_count(arguments: Any) -> int | None:
    """Return the rows of the first tensor that has any among the arguments of a call; None if there is none, or if an
    argument is an object whose rows are not known, such as a cache."""
    found: int | None = None
    for leaf in iter_leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            found = leaf.shape[0] if found is None and leaf.ndim else found
        elif not (leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))):
            return None
    return found


def cut_rows(arguments: Any, total: int, start: int, stop: int) -> Any:
    """Return the arguments with rows `start` to `stop` of every tensor of `total` rows; all others as they are."""
    return map_tensors(lambda leaf: leaf[start:stop] if leaf.ndim and leaf.shape[0] == total else leaf, arguments)


def join_rows(
    outputs: Sequence[Any], counts: Sequence[int], refusal: Refusal, reads: Callable[[torch.Tensor], None] | None = None
) -> Any:
    """Return the output of a batch from those of its parts.

    Tensors of as many rows as the part are joined; what is equal in all parts is returned as it is. Objects such as
    caches of keys and values are joined attribute by attribute.

    Args:
        outputs: What each part returned.
        counts: Rows of each part.
        refusal: Makes the error for what is neither.
        reads: Called with each tensor before it is read.
    """
    first = outputs[0]
    if all(each is first for each in outputs):
        return first
    if isinstance(first, torch.Tensor):
        if reads is not None:
            for each in outputs:
                reads(each)
        return _joined_tensors(outputs, counts, refusal)
    if first is None or isinstance(first, (bool, int, float, str, torch.dtype, torch.device, type)):
        return _equal(outputs, refusal)
    opened = [open_container(each) for each in outputs]
    container = opened[0]
    if container is not None:
        members = [each.members for each in opened if each is not None and len(each.keys) == len(container.keys)]
        if len(members) < len(outputs):
            raise refusal(_described(first))
        return container.rebuild([join_rows(each, counts, refusal, reads) for each in zip(*members, strict=True)])
    if not (hasattr(first, "__dict__") and all(vars(each).keys() == vars(first).keys() for each in outputs)):
        return _equal(outputs, refusal)
    joined = copy.copy(first)
    for name in vars(first):
        vars(joined)[name] = join_rows([vars(each)[name] for each in outputs], counts, refusal, reads)
    return joined


def _joined_tensors(tensors: Sequence[torch.Tensor], counts: Sequence[int], refusal: Refusal) -> torch.Tensor:
    if all(leaf.ndim and leaf.shape[0] == count for leaf, count in zip(tensors, counts, strict=True)):
        return torch.cat(list(tensors))
    if all(leaf.shape == tensors[0].shape and torch.equal(leaf, tensors[0]) for leaf in tensors):
        return tensors[0].clone()
    raise refusal(_described(tensors[0]))


def _equal(values: Sequence[Any], refusal: Refusal) -> Any:
    if any(each is not values[0] and each != values[0] for each in values):
        raise refusal(_described(values[0]))
    return values[0]


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
