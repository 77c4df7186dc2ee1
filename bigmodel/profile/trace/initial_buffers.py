"""Values of integer buffers on meta that no checkpoint holds, computed as the model's own code initialises them.

Models of transformers keep strides and paddings of convolutions so, as EnCodec and Mimi, and their forwards decide by
them. Loading runs `_init_weights` of the model on the module; so does this, on a stand-in with real buffers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .values import LARGEST, real_tensors

logger = logging.getLogger(__name__)


def initial_buffers(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the values of buffers on meta that are not saved, by the `id` of the buffer; the model is not changed.

    Args:
        model: any module. Those of modules that hold a weight elsewhere than on meta are left out.
    """
    found: dict[int, torch.Tensor] = {}
    for module, initialise in _with_initialisers(model, None):
        names = [name for name in module._non_persistent_buffers_set if _is_wanted(module._buffers[name])]
        if initialise is None or not names or not all(each.is_meta for each in module.parameters()):
            continue
        try:
            with real_tensors(), torch.no_grad():
                zeros, ones = (_initialised(module, names, initialise, fill) for fill in (0, 1))
        except Exception as error:  # any error of the model's own code: the values stay unknown
            logger.debug("buffers of a %s: %s", type(module).__name__, error)
            continue
        for name in names:
            if torch.equal(zeros[name], ones[name]):  # it was written
                found[id(module._buffers[name])] = zeros[name]
    return found


def _with_initialisers(module: nn.Module, initialise: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield each module with the `_init_weights` of the innermost model of transformers that it is in."""
    initialise = getattr(module, "_init_weights", initialise)
    yield module, initialise
    for child in module.children():
        yield from _with_initialisers(child, initialise)


def _is_wanted(buffer: torch.Tensor | None) -> bool:
    """Whether control flow may depend on the value of a buffer, and it is not known."""
    return buffer is not None and buffer.is_meta and not buffer.is_floating_point() and buffer.numel() <= LARGEST


def _initialised(module: nn.Module, names: list[str], initialise: Any, fill: int) -> dict[str, torch.Tensor]:
    """Return the buffers `names` of a module as its initialisation leaves them, if they were filled with a number."""
    stand_in = copy.copy(module)
    buffers = {
        name: torch.full(buffer.shape, fill, dtype=buffer.dtype, device="cpu") if name in names else buffer
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    stand_in.__dict__["_buffers"] = buffers
    initialise(stand_in)
    return {name: buffers[name] for name in names}
