"""Dataclasses among what a module is called with or returns, opened so that autograd sees the tensors in them.

What PyTorch's pytrees do not know they take for one leaf: a tensor in it would come out without its gradient. Types are
not registered for that, as their owner may come to do so.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from ..errors import DispatchError


class _Opened:
    """A dataclass, and the values of its fields apart from it."""

    def __init__(self, origin: Any, values: Sequence[Any]) -> None:
        self.origin = origin
        self.values = list(values)

    def closed(self) -> Any:
        """Return a dataclass of these values."""
        made = copy.copy(self.origin)
        for field, value in zip(dataclasses.fields(made), self.values, strict=True):
            object.__setattr__(made, field.name, closed(value))
        return made


register_pytree_node(
    _Opened,
    lambda opened: (opened.values, opened.origin),
    lambda values, origin: _Opened(origin, list(values)),
)


def opened(value: Any) -> Any:
    """Return `value` with every dataclass in it that pytrees do not know opened."""
    return tree_map(_open, value)


def closed(value: Any) -> Any:
    """Return `value` with every dataclass that was opened put together again."""
    return tree_map(
        lambda leaf: leaf.closed() if isinstance(leaf, _Opened) else leaf,
        value,
        is_leaf=lambda leaf: isinstance(leaf, _Opened),
    )


def refuse_hidden_tensors(output: Any, arguments: Any) -> None:
    """Raise for tensors that gradients are wanted for and that lie in an object whose inside nobody knows.

    Args:
        output: What a module returned, opened.
        arguments: What it was called with, opened; what is handed through, as a cache is, may hold what it likes.

    Raises:
        DispatchError: There is one.
    """
    known = {id(leaf) for leaf in tree_leaves(arguments)}
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) or id(leaf) in known:
            continue
        hidden = [name for name, held in getattr(leaf, "__dict__", {}).items() if isinstance(held, torch.Tensor)]
        if hidden:
            raise DispatchError(
                f"a streamed module returned a {type(leaf).__name__}, through whose {hidden[0]!r} no gradient would "
                "flow: return a tensor, tuple, list, dict or dataclass, or make the class known with "
                "torch.utils._pytree.register_pytree_node"
            )


def _open(leaf: Any) -> Any:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    return _Opened(leaf, [opened(getattr(leaf, field.name)) for field in dataclasses.fields(leaf)])
