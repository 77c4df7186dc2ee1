"""The units of a model: the modules that are placed as a whole, with their tensors and bytes.

A module with a residual connection adds its input to its output; if it were split, the two would be on different
devices. transformers models declare such classes. In all other models the repeated blocks are units: siblings of one
class in a `ModuleList`, `Sequential` or `ModuleDict` that have children. The outermost such module is the unit, so the
experts inside a decoder layer do not split it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ...arguments import check_model, shown
from ...errors import PlanError
from ...limits import ALIGNMENT
from ...quantized.packable import packed_bytes
from .experts import ExpertsProfile, profile_experts
from .tensors import DtypeLike, TensorSpec, owner_of, tensor_specs, with_ancestors

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""PyTorch modules that compute with their children's weights themselves, and so are never split."""

_SETTERS = ("_", "set_", "load", "reset", "init")
"""Prefixes of methods that are private or change a module's weights."""


@dataclass(frozen=True)
class UnitModule:
    """A module or tensor of a model that is placed as a whole.

    Attributes:
        name: module name, or the full name of a tensor that a split module holds itself; `""` for a model that is
            one unit.
        is_block: it is one of the repeated blocks, or its class was given as not to be split.
        is_tensor: `name` is a parameter or buffer, not a module.
        class_name: class of the module, or "Parameter" / "Buffer".
        is_lookup: an embedding: only a few rows are read, so it runs best on the device of its table.
    """

    name: str
    is_block: bool
    is_tensor: bool
    class_name: str
    is_lookup: bool = False


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


def find_units(model: nn.Module, no_split_module_classes: Iterable[str] | str | None = None) -> list[UnitModule]:
    """Split `model` into units, in the order in which modules are registered.

    A block is never split, nor is a module that uses its children's weights itself. A module that contains blocks is
    split, and so is a pure container. Every other composite module is a unit if the model has blocks; in a model
    without blocks only modules without children are units.

    Args:
        model: any module, also on meta.
        no_split_module_classes: names of classes that are not split; None: `find_no_split_classes`.

    Raises:
        PlanError: the model is not a module, or the class names are of another type.
    """
    check_model(model)
    given = no_split_module_classes is not None
    classes = as_class_names(no_split_module_classes) if given else find_no_split_classes(model)
    return _walk(model, classes, _names_around_blocks(model, classes))


def split_units(model: nn.Module) -> list[UnitModule]:
    """Split `model` into units as small as possible: its leaf modules, modules that hold tensors beside those of their
    children, and modules that write to a key-value cache.

    Keys and values are where their unit runs, so it is the whole attention of a layer, or the mixer that has a state. A
    module that uses its children's weights itself is not split either.

    Args:
        model: any module, also on meta.

    Raises:
        PlanError: the model is not a module.
    """
    check_model(model)
    caching = {
        type(module).__name__
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and not any(layer_indices(child) for child in module.children())
    }
    holding = {
        type(module).__name__
        for module in model.modules()
        if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
    }
    return _walk(model, frozenset(caching | holding), set())


def _walk(model: nn.Module, classes: frozenset[str], skeleton: Collection[str]) -> list[UnitModule]:
    """Return the units of a model: modules of `classes`, those that cannot be split, and leaf modules.

    Args:
        model: the model.
        classes: names of classes that are not split.
        skeleton: names of the modules that contain blocks; other composite modules are not split. Empty: they are.
    """
    units: list[UnitModule] = []
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        children = [(child, value) for child, value in module._modules.items() if value is not None]
        is_block = name != "" and type(module).__name__ in classes
        composite = bool(skeleton) and name not in skeleton and not isinstance(module, CONTAINERS)
        if is_block or composite or not children or is_indivisible(module):
            units.append(UnitModule(name, is_block, False, type(module).__name__, is_lookup(module)))
            continue
        dot = f"{name}." if name else ""
        for kind, tensors in (("Parameter", module._parameters), ("Buffer", module._buffers)):
            units += [UnitModule(dot + n, False, True, kind) for n, t in tensors.items() if t is not None]
        stack.extend((dot + child, value) for child, value in reversed(children))
    return units


def is_indivisible(module: nn.Module) -> bool:
    """Whether a module uses weights of its children without calling them: PyTorch's attention, parametrized modules."""
    return isinstance(module, INDIVISIBLE) or is_parametrized(module)


def is_lookup(module: nn.Module) -> bool:
    """Whether a module is an embedding whose rows are read unchanged: it runs best on the device of its table."""
    return type(module) is nn.Embedding and module.max_norm is None


def _names_around_blocks(model: nn.Module, classes: frozenset[str]) -> set[str]:
    """Return the names of all modules that contain a block."""
    names: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if name and type(module).__name__ in classes:
            parts = name.split(".")
            names.update(".".join(parts[:end]) for end in range(len(parts)))
    return names


def combining_module(modules: Mapping[str, nn.Module], name: str, whole: Collection[str]) -> str | None:
    """Return the module that may compute with the output of `name`, by the model's structure; None if there is none.

    It is the first module around `name` that has a forward of its own: lists have none, and an `nn.Sequential` passes
    an output to its next child, or on from its last. Such a module counts as computing if it has tensors of its own,
    if its class must not be split, or if no transformers model declares that all but some classes may be split.

    Args:
        modules: all modules of a model by name, the model itself under `""`.
        name: one of them.
        whole: names of classes that are not split.
    """
    below = name
    for outer in [*with_ancestors(name)][1:]:
        module = modules[outer]
        if inspect.getattr_static(type(module), "forward") not in (nn.Module.forward, nn.Sequential.forward):
            holds = any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
            declares = any(_declares_blocks(modules[each]) for each in with_ancestors(name))
            return outer if holds or not declares or type(module).__name__ in whole else None
        if type(module).forward is nn.Sequential.forward and _has_tensors_after(module, below.rpartition(".")[2]):
            return None
        below = outer
    return None


def _has_tensors_after(module: nn.Module, child: str) -> bool:
    """Return whether a child of `module` after `child` has parameters or buffers."""
    names = [*module._modules]
    later = (module.get_submodule(name) for name in names[names.index(child) + 1 :])
    return any(next(chain(each.parameters(), each.buffers()), None) is not None for each in later)


def _declares_blocks(module: nn.Module) -> bool:
    """Whether a module is a transformers model that declares which classes must not be split."""
    is_transformers = any(kind.__module__ == "transformers.modeling_utils" for kind in type(module).__mro__)
    return is_transformers and bool(getattr(module, "_no_split_modules", None))


def methods_of(module: nn.Module) -> Iterator[str]:
    """Yield the methods beside ``forward`` by which others may compute with `module`, as an autoencoder's ``decode``.

    These are the public ones that its class, or others in its file, introduce and that take arguments, but for
    overridden methods of a library's class and methods of the instance's own; abstract methods are not overridden but
    introduced, as ``encode`` of transformers' audio tokenizers. PyTorch's containers have none.
    """
    if type(module).__module__ == nn.Sequential.__module__:
        return
    own = [kind for kind in type(module).__mro__ if kind.__module__ == type(module).__module__]
    others = [kind for kind in type(module).__mro__ if kind not in own]
    seen: set[str] = set()
    for kind in own:
        for name, function in vars(kind).items():
            if name.startswith(_SETTERS) or name in seen or name == "forward" or name in module.__dict__:
                continue
            seen.add(name)
            overridden = [vars(other)[name] for other in others if name in vars(other)]
            if not inspect.isfunction(function) or not all(_is_abstract(each) for each in overridden):
                continue
            if len(inspect.signature(function).parameters) > 1 and not inspect.isgeneratorfunction(function):
                yield name


def _is_abstract(method: object) -> bool:
    return bool(getattr(method, "__isabstractmethod__", False))


@dataclass(frozen=True)
class UnitProfile:
    """One unit of a model: a block, another module, or a tensor that a split module holds itself.

    Attributes:
        name: module name, or tensor name if `is_tensor`; `""` for a model that is one unit.
        class_name: class of the module, "Parameter" or "Buffer".
        is_block: it is one of the repeated blocks, or its class was given as not to be split.
        is_tensor: `name` is a tensor.
        tensors: every name inside it, tied ones once per name.
        is_lookup: an embedding, which runs best on the device of its table.
        experts: one entry for each module in it whose experts can be fetched one by one.
    """

    name: str
    class_name: str
    is_block: bool
    is_tensor: bool
    tensors: tuple[TensorSpec, ...]
    is_lookup: bool = False
    experts: tuple[ExpertsProfile, ...] = ()

    @cached_property
    def storages(self) -> dict[int, TensorSpec]:
        """One tensor for each distinct storage; a parameter wins over a buffer that views it."""
        found: dict[int, TensorSpec] = {}
        for spec in self.tensors:
            if spec.storage not in found or (found[spec.storage].is_buffer and not spec.is_buffer):
                found[spec.storage] = spec
        return found

    @cached_property
    def weights(self) -> int:
        """Bytes of its parameters, tied ones once."""
        return sum(spec.nbytes for spec in self.storages.values() if not spec.is_buffer)

    @cached_property
    def buffers(self) -> int:
        """Bytes of its buffers."""
        return sum(spec.nbytes for spec in self.storages.values() if spec.is_buffer)

    @cached_property
    def can_pack(self) -> bool:
        """Whether the host can compute some of its weights packed."""
        return any(spec.packed is not None for spec in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters and buffers."""
        return self.weights + self.buffers

    def slot_bytes(self, with_buffers: bool = False) -> int:
        """Return the bytes of the slot it is streamed through: each tensor aligned to `ALIGNMENT`."""
        return sum(
            -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
            for spec in self.storages.values()
            if with_buffers or not spec.is_buffer
        )

    def slot_bytes_without_experts(self, with_buffers: bool = False) -> int:
        """Return the bytes of the slot without the experts that are fetched one by one."""
        return self._slot_bytes_without_experts[with_buffers]

    @cached_property
    def _slot_bytes_without_experts(self) -> tuple[int, int]:
        fused = (self.storages[number].nbytes for number in self.expert_storages)
        experts = sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in fused)
        return self.slot_bytes(False) - experts, self.slot_bytes(True) - experts

    @cached_property
    def expert_weights(self) -> int:
        """Bytes of experts that are fetched one by one."""
        return sum(self.storages[number].nbytes for number in self.expert_storages)

    @cached_property
    def expert_storages(self) -> frozenset[int]:
        """Numbers of the storages of experts that are fetched one by one."""
        return frozenset[int]().union(*(experts.storages for experts in self.experts))


def profile_units(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    as_loaded: bool = True,
    units: Sequence[UnitModule] | None = None,
    packed: bool = False,
) -> list[UnitProfile]:
    """Return the units of `model` in registration order, each with its tensors as they will be loaded.

    Args:
        model: as for `find_units`.
        dtype: as for `tensor_specs`.
        special_dtypes: as for `tensor_specs`.
        no_split_module_classes: as for `find_units`.
        as_loaded: as for `tensor_specs`.
        units: other units than those of `find_units`; each tensor belongs to the innermost one that contains it.
        packed: the host computes with packed weights where it can.
    """
    if units is None:
        units = find_units(model, no_split_module_classes)
    inside: dict[str, list[TensorSpec]] = {unit.name: [] for unit in units}
    copies = packed_bytes(model) if packed else {}
    for spec in tensor_specs(model, dtype, special_dtypes, as_loaded):
        spec = replace(spec, packed=copies[spec.name]) if spec.name in copies else spec
        owner = owner_of(spec.name, inside)
        assert owner is not None, "units cover the model"
        inside[owner].append(spec)
    modules = dict(model.named_modules(remove_duplicate=False))  # TorchScript has no get_submodule
    return [
        UnitProfile(
            name=unit.name,
            class_name=unit.class_name,
            is_block=unit.is_block,
            is_tensor=unit.is_tensor,
            tensors=tuple(inside[unit.name]),
            is_lookup=unit.is_lookup,
            experts=() if unit.is_tensor else _experts(unit.name, modules[unit.name], inside[unit.name]),
        )
        for unit in units
    ]


def _experts(name: str, module: nn.Module, specs: list[TensorSpec]) -> tuple[ExpertsProfile, ...]:
    dot = f"{name}." if name else ""
    found = (
        profile_experts((dot + inner).removesuffix("."), owner, specs, ALIGNMENT)
        for inner, owner in module.named_modules()
        if hasattr(owner, "num_experts")
    )
    return tuple(experts for experts in found if experts is not None)


def growing_layers(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return those of the named modules whose keys and values, if any, are all in layers of full attention.

    Layers with a sliding window keep few tokens, and layers that others share keys with are read by these: neither
    counts. Nor does any of a model whose forward takes no cache of transformers, or with an encoder beside the decoder.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return frozenset()
    if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        return frozenset()
    modules = dict(model.named_modules(remove_duplicate=False))
    indices = {name: layer_indices(modules[name]) for name in names}
    if not any(indices.values()):
        return frozenset()
    from transformers.cache_utils import DynamicCache, DynamicLayer

    layers = DynamicCache(config=config).layers
    full = {at for at, layer in enumerate(layers) if type(layer) is DynamicLayer} if layers else None
    return frozenset(name for name, found in indices.items() if found and (full is None or found <= full))


def layer_indices(module: nn.Module) -> set[int]:
    """Return the indices of the layers of a key-value cache that a module of a transformers model writes to."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return {index for index in found if isinstance(index, int)}
