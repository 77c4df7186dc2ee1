"""Virtual tensors while torch.compile traces: what an operation would return is known, and no memory is taken for it.

Dynamo calls operations on fake tensors, which have a device, a shape and no elements. A virtual tensor that holds a
fake one then stands for a fake tensor on its own device, as what factory functions return is there. The graphs that are
found run on real virtual tensors with ``backend="eager"``. Other backends take a tensor class apart into what it holds.
That lies on the CPU, so that what they made would run beside the books and links of the virtual accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import DeviceError

_begun = False
"""Whether anything was ever traced. Until then no operation's arguments need be looked at, which takes time."""


def is_traced(held: torch.Tensor) -> bool:
    """Whether a virtual tensor that holds `held` stands for one that is not there."""
    global _begun
    found = isinstance(held, (FakeTensor, FunctionalTensor))
    _begun = _begun or found
    return found


def mode_of(kind: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeTensorMode | None:
    """Return the mode that the arguments of an operation are fake in; None if they are real.

    Args:
        kind: the class of virtual tensors.
        args: of the operation.
        kwargs: likewise.

    Raises:
        DeviceError: a backend is taking virtual tensors apart.
    """
    for value in tree_leaves((args, kwargs)) if _begun else ():
        held = value.held if isinstance(value, kind) else None
        if isinstance(held, FunctionalTensor):
            raise DeviceError(
                "torch.compile cannot make code for a virtual accelerator, which has no machine code of its own: "
                "compile with backend='eager', which traces and runs the graphs as they are"
            )
        if isinstance(held, FakeTensor):
            return held.fake_mode
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
