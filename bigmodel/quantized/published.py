"""What a model that is loaded as stored remembers of its checkpoint: the published key of every stored tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """

    method: str
    labels: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, tuple[FusedPart, ...]] = field(default_factory=dict)


def published(model: nn.Module) -> Published | None:
    """Return what `model` remembers of its quantised checkpoint; None if it is not from one."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Published) else None


def remember(model: nn.Module, found: Published) -> None:
    """Let `model` remember its checkpoint."""
    model.__dict__[_ATTRIBUTE] = found
