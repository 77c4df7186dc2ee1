"""What a model that is loaded as stored remembers of its checkpoint: the published key of every stored tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..sources.conversion import FusedPart

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
