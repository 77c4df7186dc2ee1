"""The classes of a model's blocks: modules that must not be split over devices.

A module with a residual connection adds its input to its output; if it were split, the two would be on different
devices. transformers models declare such classes. In all other models they are the repeated blocks: siblings of one
class in a `ModuleList`, `Sequential` or `ModuleDict` that have children. The outermost such module counts, so the
experts inside a decoder layer do not split it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ...arguments import shown
from ...errors import PlanError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_no_split_classes(model: nn.Module) -> frozenset[str]:
    """Return the class names of `model` that must not be split: declared ones, else repeated blocks."""
    modules = list(model.modules())
    present = {type(module).__name__ for module in modules}
    declared = {name for module in modules for name in getattr(module, "_no_split_modules", None) or ()}
    if declared & present:
        return frozenset(declared & present)
    return frozenset(_repeated_classes(model))


def _repeated_classes(model: nn.Module) -> set[str]:
    found: set[str] = set()
    stack = [model]
    while stack:
        module = stack.pop()
        children = list(module.children())
        blocks = _blocks_of(module, children)
        found |= blocks
        stack.extend(child for child in children if type(child).__name__ not in blocks)
    return found


def _blocks_of(module: nn.Module, children: list[nn.Module]) -> set[str]:
    """Return the classes of the repeated, composite children of a container."""
    if not isinstance(module, CONTAINERS):
        return set()
    composite = [child for child in children if not isinstance(child, CONTAINERS) and any(child.children())]
    counts = Counter(type(child).__name__ for child in composite)
    least = 1 if isinstance(module, nn.ModuleList) and len(children) == 1 else 2
    return {name for name, count in counts.items() if count >= least}


def as_class_names(classes: Iterable[str] | str | None) -> frozenset[str]:
    """Return class names given as None, one name or several names as a set.

    Raises:
        PlanError: they are of another type.
    """
    if classes is None:
        return frozenset()
    if isinstance(classes, str):
        return frozenset([classes])
    if not isinstance(classes, Iterable) or isinstance(classes, (bytes, Mapping, torch.Tensor, nn.Module)):
        raise PlanError(f"no_split_module_classes is {shown(classes)}; give names of classes")
    found = list(classes)
    for each in found:
        if not isinstance(each, str):
            raise PlanError(f"no_split_module_classes holds {shown(each)}; give names of classes")
    return frozenset(found)
