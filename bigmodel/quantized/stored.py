"""Tensors as a checkpoint stores them: the base of modules that hold them, and what a model remembers to save them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..sources.conversion import FusedPart


class StoredModule(nn.Module):
    """A module some of whose parameters are tensors as a checkpoint stores them: never cast, and never trained.

    Attributes:
        stored: published name of each such parameter, by its name in the module. They differ only where the published
            one has a dot, which no parameter's name may have.
        compute_dtype: dtype that weights are restored to.
    """

    stored: dict[str, str]
    compute_dtype: torch.dtype

    def add_stored(self, published: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Add a parameter on meta for the stored tensor `published`; return its name."""
        name = published.replace(".", "_")
        empty = torch.empty(shape, dtype=dtype, device="meta")
        self.stored[name] = published
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        return name

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StoredModule:
        """Move stored tensors, but do not cast them: a cast changes the dtype that weights are restored to."""
        kept = {id(self._parameters[name]) for name in self.stored}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if id(tensor) not in kept or moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, "", keep_vars)
        destination.update({prefix + self.stored.get(name, name): tensor for name, tensor in own.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, published in self.stored.items():
            if name != published and prefix + published in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + published)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def stored_names(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that are tensors as a checkpoint stores them."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, StoredModule)
        for name in module.stored
    )


_ATTRIBUTE = "_bigmodel_published"


@dataclass(frozen=True)
class Published:
    """The checkpoint that a model's stored tensors are from.

    Attributes:
        method: name of the format.
        labels: formats in use, each with the number of weights stored so.
        sources: published keys of each stored tensor of the model, with their places in it.
        shapes: shape in the checkpoint of each part of these, and of those in `beside`.
        beside: as `sources`, for whole tensors that have other names in the checkpoint, or are fused from several.
    """

    method: str
    labels: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, tuple[FusedPart, ...]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    beside: Mapping[str, tuple[FusedPart, ...]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> Published:
        return self  # never changed, and large for a mixture

    @property
    def label(self) -> str:
        """The formats in use, each with the number of weights stored so."""
        return ", ".join(f"{label} ({count})" for label, count in self.labels.items())

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def tensors(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the published tensors, by key, that the model's tensor `name` of this value consists of."""
        parts = self.sources.get(name) or self.beside[name]
        held = getattr(value, "parts", None)  # a fused view has them as they are in their files
        if held is None:
            held = [value[part.index] for part in parts] if parts[0].index else [value]
        else:
            held = [part.value for part in held]
        return {part.key: each.reshape(self.shapes[name]) for part, each in zip(parts, held, strict=True)}


def published(model: nn.Module) -> Published | None:
    """Return what `model` remembers of its quantised checkpoint; None if it is not from one."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Published) else None


def remember(model: nn.Module, found: Published) -> None:
    """Let `model` remember its checkpoint."""
    model.__dict__[_ATTRIBUTE] = found
