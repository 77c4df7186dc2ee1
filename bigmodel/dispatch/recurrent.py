"""Recurrent layers of PyTorch, which keep a second list of their weights and compute with that.

``nn.LSTM`` and its like refer to each weight under its name and in ``_flat_weights``. Assigning an attribute keeps the
two in step; what is put into ``_parameters`` directly, as dispatching does, has to be put into the list as well.
"""

from __future__ import annotations

from typing import Any

from torch import nn

Place = tuple[list[Any], int]
"""A list of weights, and which of them."""


def second_places(module: nn.Module, key: str) -> list[Place]:
    """Return where else `module` refers to its parameter `key`."""
    if not isinstance(module, nn.RNNBase) or key not in module._flat_weights_names:
        return []
    return [(module._flat_weights, module._flat_weights_names.index(key))]


def refresh_second_places(model: nn.Module) -> None:
    """Let all recurrent layers of `model` compute with the parameters that they have by name."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights[:] = [module._parameters.get(name) for name in module._flat_weights_names]
