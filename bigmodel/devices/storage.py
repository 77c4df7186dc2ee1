"""The memory a tensor lies in, as something to compare."""

from __future__ import annotations

import torch

from .virtual.tensor import VirtualTensor


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells the memory that `tensor` lies in from other memory while both are there; 0 if there is none."""
    if isinstance(tensor, VirtualTensor):
        tensor = tensor.held
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # tensor subclasses without a storage of their own
        return 0
