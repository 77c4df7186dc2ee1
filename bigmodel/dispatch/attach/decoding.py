"""Generation decides by the device that a model runs on, and not by that of its first weights.

transformers selects an experts function for steps of generation by ``model.device``, which is the device of its first
weights. Those of a dispatched model may lie on the host while it runs on an accelerator; a resident model would select
another function, whose last bits differ.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .refusals import NotCopied

METHOD = "_optimize_model_for_decode"
"""The context that transformers runs steps of generation in."""


class DecodeAsResident(NotCopied):
    """Replaces a model's `METHOD`, such that it finds the model on `device`.

    Args:
        model: The model.
        device: Its main device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = weakref.ref(model)
        self._device = device

    def __call__(self) -> AbstractContextManager[None]:
        model: Any = self._model()
        found: AbstractContextManager[None] = getattr(type(model), METHOD)(_ModelOnDevice(model, self._device))
        return found


class _ModelOnDevice:
    """A model as `METHOD` sees it: all of its attributes, but for its device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
