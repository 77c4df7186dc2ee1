"""The pieces of a model that are placed as a whole, with their tensors and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from .dtypes import DtypeLike
from .experts import ExpertsProfile, profile_experts
from .no_split import find_units
from .tensors import TensorSpec, tensor_specs

SLAB_ALIGNMENT = 512
"""Each tensor in a streaming slot starts at a multiple of this many bytes, as in CUDA's caching allocator."""


@dataclass(frozen=True)
class UnitProfile:
    """One piece of a model: a block, another module, or one tensor that a split module holds itself.

    Attributes:
        name: module name, or tensor name when `is_tensor`; `""` for a model that is one piece.
        class_name: class of the module, "Parameter" or "Buffer".
        is_block: it is one of the repeated blocks (or was named as not to be split).
        is_tensor: `name` is a tensor.
        tensors: every name inside it, tied ones once per name.
        is_lookup: an embedding, best run where its table lies.
        experts: its experts that can be fetched one by one, a module's at a time.
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

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters and buffers."""
        return self.weights + self.buffers

    def slab(self, with_buffers: bool = False) -> int:
        """Return the bytes of the slot it is streamed through: each tensor aligned to `SLAB_ALIGNMENT`."""
        return sum(
            -(-spec.nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
            for spec in self.storages.values()
            if with_buffers or not spec.is_buffer
        )

    def slab_without_experts(self, with_buffers: bool = False) -> int:
        """Return the bytes of the slot for what is streamed as a whole: all but experts, which come one by one."""
        return self._slabs_without_experts[with_buffers]

    @cached_property
    def _slabs_without_experts(self) -> tuple[int, int]:
        fused = (self.storages[number].nbytes for number in self._expert_storages)
        experts = sum(-(-nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT for nbytes in fused)
        return self.slab(False) - experts, self.slab(True) - experts

    @cached_property
    def expert_weights(self) -> int:
        """Bytes of experts that come one by one."""
        return sum(self.storages[number].nbytes for number in self._expert_storages)

    @cached_property
    def _expert_storages(self) -> frozenset[int]:
        return frozenset[int]().union(*(experts.storages for experts in self.experts))


def profile_units(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    as_loaded: bool = True,
) -> list[UnitProfile]:
    """Return the units of `model` in registration order, each with its tensors as they will be loaded.

    Arguments are those of `tensor_specs` and `find_units`.
    """
    units = find_units(model, no_split_module_classes)
    inside: dict[str, list[TensorSpec]] = {unit.name: [] for unit in units}
    for spec in tensor_specs(model, dtype, special_dtypes, as_loaded):
        owner = next(name for name in _itself_and_ancestors(spec.name) if name in inside)
        inside[owner].append(spec)
    return [
        UnitProfile(
            name=unit.name,
            class_name=unit.class_name,
            is_block=unit.is_block,
            is_tensor=unit.is_tensor,
            tensors=tuple(inside[unit.name]),
            is_lookup=unit.is_lookup,
            experts=() if unit.is_tensor else _experts(unit.name, model.get_submodule(unit.name), inside[unit.name]),
        )
        for unit in units
    ]


def _experts(name: str, module: nn.Module, specs: list[TensorSpec]) -> tuple[ExpertsProfile, ...]:
    dot = f"{name}." if name else ""
    found = (
        profile_experts((dot + inner).removesuffix("."), owner, specs, SLAB_ALIGNMENT)
        for inner, owner in module.named_modules()
    )
    return tuple(experts for experts in found if experts is not None)


def _itself_and_ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
