"""Modules that do the same: a few layers of a dry run stand for all, and a call of one module for that of another.

Modules are compared in two ways. Before a dry run, `module_signature` compares how they are built: classes, shapes and
plain settings. During one, `ModuleStructures` compares everything that a forward may read beside its arguments, and
notices whether an attribute has been set since. From top to bottom: signatures; samples of layers; structures.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..model.units import UnitProfile
from .values import known_value

POSITIONS = frozenset({"layer_idx", "layer_id", "layer_index"})
"""Attributes of modules that say which layer they belong to."""

SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of attributes and arguments that are compared by value."""

CONTEXT = 2
"""Layers before a layer that must be of the same kinds for two layers to count as the same: storages of one layer may
be freed by the next ones."""


def block_signature(block: nn.Module) -> object:
    """Return a value that is equal for two blocks that do the same: classes, shapes and plain settings inside."""
    return tuple((name, *module_signature(module)) for name, module in block.named_modules())


def module_signature(module: nn.Module) -> tuple[object, ...]:
    """Return a value that is equal for two modules that do the same, but for the modules in them."""
    tensors = [(k, t.shape, t.dtype) for k, t in {**module._parameters, **module._buffers}.items() if t is not None]
    settings = sorted(
        (k, v) for k, v in vars(module).items() if isinstance(v, (int, float, str, bool)) and k not in POSITIONS
    )
    return type(module), tuple(tensors), tuple(map(repr, settings))


def model_signature(model: nn.Module, counts: Mapping[str, int]) -> Hashable:
    """Return a value that is equal for models that record the same.

    Args:
        model: the model.
        counts: by name of a list of blocks, how many from its start are run; of others, all are.
    """
    parts: list[Hashable] = []
    inside = tuple(f"{path}." for path in counts)
    for name, module in model.named_modules():
        if name in counts:
            blocks = list(module.children())[: counts[name]]
            parts.append((name, tuple(map(block_signature, blocks))))
        elif not name.startswith(inside):
            parts.append((name, *module_signature(module)))
    return tuple(parts)


@dataclass(frozen=True)
class LayerSample:
    """A list of blocks and the few of them that stand for all.

    Attributes:
        path: name of the list in the model.
        units: unit index of each block of the full list.
        count: blocks from the start that are run; the last of them stands for the full list's last.
        stand_ins: for each block of the full list, the position of the run block that stands for it.
    """

    path: str
    units: tuple[int, ...]
    count: int
    stand_ins: tuple[int, ...]

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of the list in `model`: all of them, or the sampled ones of a clone."""
        return list(model.get_submodule(self.path).children())

    def extended(self, units: Collection[int]) -> frozenset[int]:
        """Return recorded units together with those that they stand for."""
        layers = {unit for unit, by in zip(self.units, self.stand_ins, strict=True) if self.units[by] in units}
        return frozenset(units).difference(self.units[: self.count]) | layers


def find_layer_samples(model: nn.Module, units: Sequence[UnitProfile]) -> list[LayerSample]:
    """Return a sample of each list of blocks of `model` that is long enough for one."""
    number = {unit.name: index for index, unit in enumerate(units) if unit.is_block}
    found = []
    for path, module in model.named_modules():
        names = [f"{path}.{child}" if path else child for child in module._modules]
        if not isinstance(module, nn.ModuleList) or not all(name in number for name in names):
            continue
        sampled = sample_layers([block_signature(block) for block in module])
        if sampled is not None:
            found.append(LayerSample(path, tuple(number[name] for name in names), *sampled))
    return found


def sample_layers(signatures: Sequence[object]) -> tuple[int, tuple[int, ...]] | None:
    """Return how many layers from the start stand for all, and which of these stands for each layer.

    A layer stands for another when both and the `CONTEXT` layers before them have the same signatures. The last
    sampled layer stands for the very last one.

    Args:
        signatures: one value per layer; equal values mean layers that do the same.

    Returns:
        None when no layer can be left out.
    """
    total = len(signatures)
    windows = [tuple(signatures[i - CONTEXT : i + 1]) for i in range(CONTEXT, total)]
    for count in range(CONTEXT + 2, total):
        if windows[count - 1 - CONTEXT] != windows[-1]:
            continue
        known = {window: CONTEXT + i for i, window in enumerate(windows[: count - 1 - CONTEXT])}
        middle = windows[count - 1 - CONTEXT : -1]
        if all(window in known for window in middle):
            return count, (*range(count - 1), *(known[window] for window in middle), count - 1)
    return None


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tensors and modules, which are compared by shape and structure, and hooks."""

_HOOKS = frozenset(name for name in _OF_MODULES if name.endswith("_hooks"))

_REPLACED = frozenset({"forward", "_apply"})
"""Methods that the recorder and the fake clone replace."""

_UNCHANGING = (type, FunctionType, MethodType, BuiltinFunctionType, functools.partial, torch.Tensor, nn.Module)
"""Types of attributes that have no settings that a forward reads."""


@dataclass(frozen=True)
class ModuleStructure:
    """The structure of a module when it was examined.

    Attributes:
        number: equal for modules that do the same; None: what this one does is not known from its attributes.
        states: the modules in it, and itself, each with its state (`_state_of`) at that time.
    """

    number: int | None
    states: tuple[tuple[nn.Module, tuple[object, ...]], ...] = ()

    def is_unchanged(self) -> bool:
        """Return whether no attribute has been set since."""
        return all(_state_of(module) == state for module, state in self.states)


class ModuleStructures:
    """Finds which modules of a fake model do the same.

    Args:
        model: the model, before its methods are wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[int, ModuleStructure] = {}
        self._numbers: dict[Hashable, int] = {}
        self._numbers_of_settings: dict[Hashable, int] = {}
        self._held: list[object] = []  # objects compared by `id`: no other object gets it while they are alive
        self._objects: dict[int, Any] = {}  # what modules read beside tensors: configs
        for module in model.modules():
            own = ((name, value) for name, value in vars(module).items() if name not in _OF_MODULES)
            self._objects.update((id(value), value) for _, value in own if _has_settings(value))
            if "forward" in vars(module):
                self._found[id(module)] = ModuleStructure(None)

    def of(self, module: nn.Module) -> ModuleStructure:
        """Return the structure that a module had when it was first asked for."""
        found = self._found.get(id(module))
        if found is None:
            self._found[id(module)] = ModuleStructure(None)  # for a module that contains itself
            found = self._found[id(module)] = self._examined(module)
        return found

    @property
    def settings(self) -> int:
        """A number that is equal for equal settings of all configs: which kernels are called depends on them."""
        settings = tuple(tuple(map(id, vars(each).values())) for each in self._objects.values())
        found = self._numbers_of_settings.get(settings)
        if found is None:
            found = self._numbers_of_settings[settings] = len(self._numbers_of_settings)
            self._held += [value for each in self._objects.values() for value in vars(each).values()]
        return found

    def _examined(self, module: nn.Module) -> ModuleStructure:
        """Return the structure of a module as it is now."""
        own = vars(module)
        if any(own[name] for name in _HOOKS):
            return ModuleStructure(None)
        parts: list[Any] = [type(module), module.training]
        for name, value in own.items():
            if name in _OF_MODULES or name in POSITIONS or name in _REPLACED:
                continue
            if _has_settings(value) and id(value) not in self._objects:
                return ModuleStructure(None)
            parts.append((name, _compared(value)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:  # PyTorch multiplies with one that requires gradients in another way
                settings = tensor.stride(), tensor.dtype, tensor.requires_grad
                parts.append((name, tensor.shape, settings, id(known_value(tensor))))
        self._held += [value for value in own.values() if type(value) in SCALARS]
        states = [(module, _state_of(module))]
        for name, child in module._modules.items():
            inner = None if child is None else self.of(child)
            if inner is not None and inner.number is None:
                return inner
            parts.append((name, None if inner is None else inner.number))
            states += () if inner is None else inner.states
        return ModuleStructure(self._numbers.setdefault(tuple(parts), len(self._numbers)), tuple(states))


def _compared(value: Any) -> Hashable:
    """Return what is compared of an attribute of a module: the value of a plain one, else which object it is."""
    kind = type(value)
    if kind in SCALARS:
        return kind, value
    if kind is dict:
        return kind, tuple((_compared(key), _compared(member)) for key, member in value.items())
    if kind is tuple or kind is list:
        return kind, tuple(map(_compared, value))
    return kind, tuple(map(_compared, _fields(value))) if _is_frozen(value) else id(value)


def _is_frozen(value: Any) -> bool:
    """Return whether an object is an immutable record, as a format of weights: it is compared by its fields."""
    return is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]


def _fields(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in fields(value)]


def _has_settings(value: Any) -> bool:
    """Return whether an attribute of a module is an object with attributes that may change, as a config."""
    if _is_frozen(value):
        return any(map(_has_settings, _fields(value)))
    return hasattr(value, "__dict__") and not isinstance(value, _UNCHANGING)


def _state_of(module: nn.Module) -> tuple[object, ...]:
    """Return what changes if an attribute of a module is set, or a member of one that is a collection."""
    own = vars(module)
    found: list[object] = [*map(id, own.values())]
    for place, (name, member) in enumerate(own.items()):
        if name in POSITIONS and isinstance(member, int):
            found[place] = int(member)
        kind = type(member)
        if kind is dict and name not in _HOOKS:
            found += map(id, member.values())
        elif kind is list or kind is set:
            found += map(id, member)
    return tuple(found)
