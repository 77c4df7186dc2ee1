"""The tensors of a module as targets of a load: each tensor once, with all its names and places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class ModelTensor:
    """One parameter or buffer of a model, and every place that refers to it.

    Attributes:
        tensor: its present value.
        names: its names, in the model's order; several where it is tied.
        places: the modules' ``_parameters`` or ``_buffers`` and the key in each, one for each name.
        is_buffer: it is a buffer, not a parameter.
        persistent: it belongs to the state dict.
    """

    tensor: torch.Tensor
    is_buffer: bool
    persistent: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def fill(self, value: torch.Tensor) -> None:
        """Put `value` in every place, as a Parameter like the present one if that is a parameter."""
        new = value if self.is_buffer else parameter_like(self.tensor, value)
        for registry, key in self.places:
            registry[key] = new
        self.tensor = new

    def merge(self, other: ModelTensor) -> None:
        """Take over the names and places of `other`, so that the two are tied."""
        self.names += other.names
        self.places += other.places

    def split(self, names: Iterable[str]) -> ModelTensor:
        """Move some of the names to a target of their own."""
        taken = set(names)
        apart = ModelTensor(self.tensor, self.is_buffer, self.persistent)
        pairs = list(zip(self.names, self.places, strict=True))
        apart.names = [name for name, _ in pairs if name in taken]
        apart.places = [place for name, place in pairs if name in taken]
        self.names = [name for name, _ in pairs if name not in taken]
        self.places = [place for name, place in pairs if name not in taken]
        return apart


def find_model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and buffer of `model` once, in the model's order. Names of shared modules are all found."""
    targets: dict[int, ModelTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for registry, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                persistent = not (is_buffer and key in module._non_persistent_buffers_set)
                target = targets.get(id(tensor))
                if target is None:
                    target = targets[id(tensor)] = ModelTensor(tensor, is_buffer, persistent)
                target.persistent |= persistent
                target.names.append(dot + key)
                target.places.append((registry, key))
    return list(targets.values())


def parameter_like(original: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    """`value` as a Parameter of the class of `original`, with its attributes and its ``requires_grad``."""
    wants_gradient = original.requires_grad and (value.is_floating_point() or value.is_complex())
    kind = type(original)
    if kind is nn.Parameter or type(value) is not torch.Tensor:
        result = nn.Parameter(value, requires_grad=wants_gradient)
    else:
        # Not `kind(value)`: a subclass may want other arguments.
        result = torch.Tensor._make_subclass(kind, value, wants_gradient)  # type: ignore[assignment]
    for name, attribute in original.__dict__.items():
        result.__dict__.setdefault(name, attribute)
    return result
