"""Virtual tensors while torch.compile traces: outputs have shapes and devices, but no elements and no memory.

Dynamo calls operations on fake tensors, which have a device and a shape but no elements. A virtual tensor that wraps a
fake one represents a fake tensor on its virtual device. The traced graphs run on real virtual tensors with
``backend="eager"``. Other backends unwrap a tensor subclass into its inner tensors; these are on the CPU, so the
compiled code would bypass the memory counters and links of the virtual accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_map

from ...errors import DeviceError

_begun = False
"""Whether any tensor was ever traced. Until then the arguments of operations are not inspected, which takes time."""


def is_begun() -> bool:
    """Whether any tensor was ever traced; until then no operation is."""
    return _begun


def is_traced(held: torch.Tensor) -> bool:
    """Whether a virtual tensor that wraps `held` has no elements, because it is being traced."""
    global _begun
    if type(held) is torch.Tensor or not isinstance(held, (FakeTensor, FunctionalTensor)):
        return False
    _begun = True
    return True


def mode_of(kind: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeTensorMode | None:
    """Return the fake-tensor mode of an operation's arguments; None if they are real.

    Args:
        kind: the class of virtual tensors.
        args: positional arguments of the operation.
        kwargs: its keyword arguments.

    Raises:
        DeviceError: a compiler backend is unwrapping virtual tensors.
    """
    return _mode_in(kind, (*args, *kwargs.values()))


def _mode_in(kind: type[Any], values: Iterable[Any]) -> FakeTensorMode | None:
    for value in values:
        if isinstance(value, kind):
            held = value.held
            if isinstance(held, FunctionalTensor):
                raise DeviceError(
                    "torch.compile cannot generate code for a virtual accelerator: compile with backend='eager', which "
                    "traces and runs the graphs as they are"
                )
            if isinstance(held, FakeTensor):
                return held.fake_mode
        elif isinstance(value, (list, tuple)):
            mode = _mode_in(kind, value)
            if mode is not None:
                return mode
    return None


def run_traced(
    mode: FakeTensorMode, kind: type[Any], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what `func` returns, as fake tensors on the devices of its arguments."""

    def fake(value: Any) -> Any:
        if not isinstance(value, kind):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)

    with mode:
        args, kwargs = tree_map(fake, (args, kwargs))
        return func(*args, **kwargs)
