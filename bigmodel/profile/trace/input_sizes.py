"""Sizes of the arguments of a forward: which calls take no more than one that memory was planned for.

A call is covered by another if each of its arguments is: a tensor by one of as many dimensions, each at least as long,
of elements at least as large; a number or a flag by one that is no smaller; and what is left out, None, False or 0 by
anything. Texts and floating point numbers are not compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...devices.nested import tensors_in

Extent = tuple[int, ...]
"""Of a tensor: its shape and the bytes of an element; of a number or a flag: its value."""

InputSizes = Mapping[str, tuple[Extent, ...]]
"""Extents of the tensors and numbers in each argument of a call, by the argument's name."""


def positional_names(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the names of the parameters that take positional arguments one by one."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)


def input_sizes(names: Sequence[str], args: Iterable[Any], kwargs: Mapping[str, Any]) -> InputSizes:
    """Return the sizes of the arguments of a call, without those that take nothing.

    Args:
        names: as `positional_names`.
        args: positional arguments; those beyond the names are named by their position.
        kwargs: keyword arguments.
    """
    named = ((names[place] if place < len(names) else str(place), value) for place, value in enumerate(args))
    return {name: found for name, value in (*named, *kwargs.items()) if (found := tuple(_extents(value)))}


def are_covered(sizes: InputSizes, known: Collection[InputSizes]) -> bool:
    """Whether one of the `known` calls covers one of these sizes."""
    return any(all(_covers(other.get(name, ()), extents) for name, extents in sizes.items()) for other in known)


def _extents(value: Any) -> Iterator[Extent]:
    if isinstance(value, torch.Tensor):
        yield (*value.shape, value.itemsize)
    elif isinstance(value, int):
        if value:
            yield (int(value),)
    elif value is not None and not isinstance(value, (float, str)):
        for tensor in tensors_in(value, set()):
            yield (*tensor.shape, tensor.itemsize)


def _covers(larger: Sequence[Extent], extents: Sequence[Extent]) -> bool:
    """Whether each extent is no larger than the one at its place."""
    return len(extents) <= len(larger) and all(
        len(one) == len(other) and all(size <= most for size, most in zip(one, other, strict=True))
        for one, other in zip(extents, larger)
    )
