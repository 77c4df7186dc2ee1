"""Finding a module that fits into what is left of a device, inside modules that do not fit (`fallback_allocate`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ..devices import parse_size
from ..errors import SizeError
from .modeling import get_module_size_with_ties

Named = tuple[str, Any]


def fallback_allocate(
    modules: list[Named],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Collection[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[Named]]:
    """Find the first module, or part of one, that is not larger than `size_limit`.

    Args:
        modules: Pairs of name and module, whose parts are considered in turn.
        module_sizes: Bytes by name, as `compute_module_sizes` returns them.
        size_limit: Bytes, also as "1GB". One that cannot be read is met by none.
        no_split_module_classes: Classes whose parts are not considered.
        tied_parameters: Groups of names of tied parameters: what is tied to a module counts with it.

    Returns:
        Its name, itself, and `modules` without it, in which what it was part of is taken apart; None, None and
        `modules` if none is found.
    """
    try:
        limit = parse_size(size_limit)
    except SizeError:
        return None, None, modules
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        tied = _tied_elsewhere(name, tied_parameters or (), waiting)
        size, _, _ = get_module_size_with_ties(tied, module_sizes[name], module_sizes, waiting)
        if size <= limit:
            return _taken_out(name, modules)
        if isinstance(module, nn.Module) and type(module).__name__ not in (no_split_module_classes or ()):
            waiting = _parts(name, module) + waiting
    return None, None, modules


def _tied_elsewhere(name: str, groups: Sequence[Sequence[str]], waiting: Sequence[Named]) -> list[str]:
    """Return the parameters of modules that wait which are tied to some inside a module."""
    found: list[str] = []
    for group in groups:
        outside = [other for other in group if f"{name}." not in f"{other}."]
        if outside and len(outside) < len(group):
            found += [other for other in outside if any(other.startswith(f"{key}.") for key, _ in waiting)]
    return found


def _parts(name: str, module: nn.Module) -> list[Named]:
    """Return what is directly inside; a module without children has none, as it is not split."""
    children = list(module.named_children())
    own = list(module.named_parameters(recurse=False)) if children else []
    return [(f"{name}.{key}", each) for key, each in [*own, *children]]


def _taken_out(name: str, modules: list[Named]) -> tuple[str, Any, list[Named]]:
    """Take a module out of a list that holds it, or what it is part of."""
    left = list(modules)
    while name not in (names := [each for each, _ in left]):
        index = next(index for index, each in enumerate(names) if name.startswith(f"{each}."))
        left[index : index + 1] = _parts(*left[index])
    found, module = left.pop(names.index(name))
    return found, module, left
