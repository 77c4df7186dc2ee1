"""Which modules must stay in one piece, found without being told.

A module with a residual connection adds what went in to what came out; cut in two, the halves would meet on
different devices. transformers models name such classes. For any other model the repeated blocks are taken:
modules of one class that sit side by side in a `ModuleList`, `Sequential` or `ModuleDict` and have modules of
their own inside. The outermost such module counts, so experts inside a decoder layer do not split it.

Which modules compute with what others inside them return, and so have it brought to where they compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ...arguments import check_model, shown
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


@dataclass(frozen=True)
class UnitModule:
    """A piece of a model that is placed as a whole.

    Attributes:
        name: module name, or the full name of one tensor that a split module holds itself; `""` for a model
            that is one piece.
        is_block: it is one of the repeated blocks, or was named as not to be split.
        is_tensor: `name` is a parameter or buffer, not a module.
        class_name: class of the module, or "Parameter" / "Buffer".
        is_lookup: an embedding: a few rows of its table are read, so it is best run where the table lies.
    """

    name: str
    is_block: bool
    is_tensor: bool
    class_name: str
    is_lookup: bool = False


def as_class_names(classes: Iterable[str] | str | None) -> frozenset[str]:
    """Return class names given as None, one name or several, as a set.

    Raises:
        PlanError: they are something else.
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


def find_units(model: nn.Module, no_split_module_classes: Iterable[str] | str | None = None) -> list[UnitModule]:
    """Cut `model` into the pieces that are placed as a whole, in the order the modules are registered.

    A block is never cut. A module that holds blocks is cut, and so is a pure container. Every other composite
    module stays whole while there are blocks to cut around it; in a model without any blocks only modules
    without children are whole.

    Args:
        model: any module, also on meta.
        no_split_module_classes: class names not to be split; None: find them (`find_no_split_classes`).

    Raises:
        PlanError: the model is no module, or the class names are something else.
    """
    check_model(model)
    given = no_split_module_classes is not None
    classes = as_class_names(no_split_module_classes) if given else find_no_split_classes(model)
    skeleton = _names_around_blocks(model, classes)
    units: list[UnitModule] = []
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        children = [(child, value) for child, value in module._modules.items() if value is not None]
        is_block = name != "" and type(module).__name__ in classes
        composite = bool(skeleton) and name not in skeleton and not isinstance(module, CONTAINERS)
        if is_block or composite or not children:
            units.append(UnitModule(name, is_block, False, type(module).__name__, _is_lookup(module)))
            continue
        dot = f"{name}." if name else ""
        for kind, tensors in (("Parameter", module._parameters), ("Buffer", module._buffers)):
            units += [UnitModule(dot + n, False, True, kind) for n, t in tensors.items() if t is not None]
        stack.extend((dot + child, value) for child, value in reversed(children))
    return units


def _is_lookup(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None


def _names_around_blocks(model: nn.Module, classes: frozenset[str]) -> set[str]:
    """Return the names of all modules that hold a block somewhere inside."""
    names: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if name and type(module).__name__ in classes:
            parts = name.split(".")
            names.update(".".join(parts[:end]) for end in range(len(parts)))
    return names


def combining_module(modules: Mapping[str, nn.Module], name: str, whole: Collection[str]) -> str | None:
    """Return the module around `name` that computes with what `name` returns; None if that only passes it on.

    A module that holds tensors itself computes with them. Others do unless their model declares which modules must not
    be split, and thereby that all else may be.

    Args:
        modules: all modules of a model by name, the model itself under `""`.
        name: one of them.
        whole: names of the classes that must not be split.
    """
    if not name:
        return None
    around = name.rpartition(".")[0]
    while around and type(modules[around]).forward is nn.Module.forward:
        around = around.rpartition(".")[0]
    module = modules[around]
    declares = bool(getattr(modules[""], "_no_split_modules", None))
    holds = any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
    return around if holds or not declares or type(module).__name__ in whole else None
