"""The tensors of a module as targets of a load: each tensor once, with all its names and all references to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class ModelTensor:
    """One parameter or buffer of a model, and every reference to it.

    Attributes:
        tensor: its present value.
        names: its names, in the model's order; several if it is tied.
        places: the module's ``_parameters`` or ``_buffers`` and the key in it, one pair per name.
        is_buffer: whether it is a buffer, not a parameter.
        persistent: whether it belongs to the state dict.
    """

    tensor: torch.Tensor
    is_buffer: bool
    persistent: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    def fill(self, value: torch.Tensor) -> None:
        """Put `value` in every place; for a parameter, as a Parameter of the same class and attributes."""
        new = value if self.is_buffer else parameter_like(self.tensor, value)
        for registry, key in self.places:
            registry[key] = new
        self.tensor = new

    def merge(self, other: ModelTensor) -> None:
        """Tie `other` to this tensor: take over its names and places."""
        self.names += other.names
        self.places += other.places

    def split(self, names: Iterable[str]) -> ModelTensor:
        """Untie `names`: move them to a new target and return it."""
        untied = set(names)
        other = ModelTensor(self.tensor, self.is_buffer, self.persistent)
        pairs = list(zip(self.names, self.places, strict=True))
        other.names = [name for name, _ in pairs if name in untied]
        other.places = [place for name, place in pairs if name in untied]
        self.names = [name for name, _ in pairs if name not in untied]
        self.places = [place for name, place in pairs if name not in untied]
        return other


def find_model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return every parameter and buffer of `model` once, in the model's order, with all names of shared modules."""
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
    """Return `value` as a Parameter with the class, attributes and ``requires_grad`` of `original`."""
    wants_gradient = original.requires_grad and (value.is_floating_point() or value.is_complex())
    kind = type(original)
    if kind is nn.Parameter or type(value) is not torch.Tensor:
        result = nn.Parameter(value, requires_grad=wants_gradient)
    else:
        # Not `kind(value)`: a subclass may take other arguments.
        result = torch.Tensor._make_subclass(kind, value, wants_gradient)  # type: ignore[assignment]
    for name, attribute in original.__dict__.items():
        result.__dict__.setdefault(name, attribute)
    return result
