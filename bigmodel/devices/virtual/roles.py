"""Roles of an operation's arguments: their memory is read, written, or neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

_UNTOUCHED = ("empty", "new_", "set_", "resize_", "record_stream", "lift_fresh", "_unsafe_view", "_reshape_alias")
"""Beginnings of the names of operations that look at no element of their arguments, besides views and `_like`."""

Rows = Callable[..., list[int]]
"""Returns which rows, indices of the first dimension, an operation reads, given its arguments on the host."""


class Roles(NamedTuple):
    """The roles of an operation's arguments.

    Attributes:
        positions: Positions of those that it writes to.
        names: Names of the keyword arguments that it writes to.
        reads: Whether it reads the others.
    """

    positions: frozenset[int]
    names: frozenset[str]
    reads: bool

    @property
    def only_reads(self) -> bool:
        """Whether it reads all of them and writes to none."""
        return self.reads and not (self.positions or self.names)


@cache
def roles_of(func: OpOverload) -> Roles | None:
    """Return the roles of an operation's arguments; None if it accesses no memory, as views do not."""
    name = func._schema.name.partition("::")[2]
    written = [
        (position, argument)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    reads = not (name.startswith(_UNTOUCHED) or name.endswith("_like"))
    if func.is_view or (not reads and not name.startswith("new_") and not name.endswith("_like")):
        return None
    return Roles(
        frozenset(position for position, argument in written if not argument.kwarg_only),
        frozenset(argument.name for _, argument in written),
        reads,
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of one argument: itself, or those in a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, Tensor):
                yield each


def rows_read(func: OpOverload, args: Sequence[Any]) -> list[int] | None:
    """Return the rows of its gathered argument that an operation reads; None: all of them.

    Args:
        func: The operation.
        args: Its arguments, held on the host. The gathered one is at position `GATHERED`.
    """
    rows = _ROWS.get(func)
    return None if rows is None else rows(*args)


def _indexed(_: Tensor, indices: list[Tensor | None], *more: Any) -> list[int] | None:
    first = indices[0]
    return None if first is None or first.is_floating_point() or first.dtype == torch.bool else _distinct(first)


def _selected(_: Tensor, dim: int, index: Tensor, *more: Any) -> list[int] | None:
    return _distinct(index) if dim == 0 else None


def _embedded(_: Tensor, indices: Tensor, *more: Any) -> list[int] | None:
    return _distinct(indices)


def _grouped(left: Tensor, right: Tensor, offsets: Tensor | None = None, *more: Any) -> list[int] | None:
    if offsets is None or right.dim() != 3:
        return None
    ends = offsets.tolist()
    return [row for row, (begin, end) in enumerate(zip([0, *ends], ends)) if end > begin]


def _distinct(index: Tensor) -> list[int]:
    found: list[int] = torch.unique(index).tolist()
    return found


GATHERED: dict[OpOverload, int] = {
    aten.index.Tensor: 0,
    aten.index_select.default: 0,
    aten.embedding.default: 0,
    aten._grouped_mm.default: 1,
}
"""Operations that read some rows of an argument, which others may be written meanwhile, and its position."""

_ROWS: dict[OpOverload, Callable[..., list[int] | None]] = {
    aten.index.Tensor: _indexed,
    aten.index_select.default: _selected,
    aten.embedding.default: _embedded,
    aten._grouped_mm.default: _grouped,
}
