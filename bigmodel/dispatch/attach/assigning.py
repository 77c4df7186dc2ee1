"""`load_state_dict(assign=True)` of a dispatched model: weights stay on their devices.

It would put tensors in the place of weights as they come, from a file for example on the host, and the next forward
would compute with tensors of several devices, or miss the weight that it streams. They are copied into the weights
instead, as without `assign`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .refusals import NotCopied

METHOD = "_load_from_state_dict"

_ASSIGNS = "assign_to_params_buffers"
"""Key of PyTorch's metadata for loading one module."""


class CopiesAssigned(NotCopied):
    """Replaces ``module._load_from_state_dict``, which ``load_state_dict`` calls for every module.

    Args:
        module: The module, or a part of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        module = self._module()
        assert module is not None, "the module is gone"
        if local_metadata.get(_ASSIGNS) and any(_lie_apart(module, state_dict, prefix)):
            local_metadata = {**local_metadata, _ASSIGNS: False}
        type(module)._load_from_state_dict(module, state_dict, prefix, local_metadata, *rest)


def _lie_apart(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Iterator[bool]:
    for registry in (module._parameters, module._buffers):
        for name, tensor in registry.items():
            given = state_dict.get(prefix + name)
            if tensor is not None and isinstance(given, torch.Tensor):
                yield given.device != tensor.device
