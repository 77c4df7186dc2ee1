"""Weights on the host that are used outside the forward of their unit, on an accelerator.

While a unit runs, its modules refer to copies on the device. Code outside it may use the same weights: a parent that
computes with a child's weight, a method beside ``forward``, a child that is called by itself. What it then finds are
the host tensors, and these follow: in an operation with tensors on an accelerator, a copy of theirs takes part there.
What is written in place stays where it is, and what else takes part comes to it. What such tensors are made into on the
host follows in the same way: slices, transposed views, sums.

Tensors keep their identity: only their class changes, and changes back when the model is undispatched. Inside their
unit's forward none of this code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from ...devices.nested import iter_tensors, map_tensors

_READS = frozenset(
    ("detach", "to", "cpu", "cuda", "type", "numpy", "tolist", "item", "__deepcopy__", "__reduce_ex__", "__iter__")
)
"""What takes a tensor's value out of the model: results are plain tensors. So are clones of parameters."""

_VIEWS = frozenset(("T", "H", "mT", "mH", "real", "imag"))
"""Attributes that are tensors to compute with, unlike ``.data`` and ``.grad``."""

_PLAIN_DUNDERS = frozenset(("__invert__", "__index__", "__int__"))


class _Follows:
    """The behaviour of host tensors that follow what they are computed with."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            kwargs = kwargs or {}
            name = func.__name__
            operands = _operands(args, kwargs)
            target = _device_of_result(name, operands, args, kwargs)
            if target is not None:
                args, kwargs = map_tensors(lambda tensor: _brought(tensor, target), (args, kwargs))
            result = func(*args, **kwargs)
            if not PLAIN.keys() >= set(map(type, operands)) or _is_read(func, name, args):
                return result
            return map_tensors(_following, result)


class OffloadedParameter(_Follows, nn.Parameter):
    """A parameter on the host."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(torch.Tensor._make_subclass(nn.Parameter, self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))


class OffloadedTensor(_Follows, torch.Tensor):
    """A buffer on the host, or what was made of a parameter there."""

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.detach().__reduce_ex__(proto)


def follow(tensors: Iterable[torch.Tensor]) -> None:
    """Have plain host tensors follow what they are computed with. Those of other classes stay as they are."""
    for tensor in tensors:
        if type(tensor) is nn.Parameter:
            tensor.__class__ = OffloadedParameter
        elif type(tensor) is torch.Tensor:
            tensor.__class__ = OffloadedTensor


def follows(tensor: torch.Tensor) -> bool:
    """Whether a tensor follows what it is computed with."""
    return isinstance(tensor, _Follows)


def follow_no_more(tensors: Iterable[torch.Tensor]) -> None:
    """Make tensors plain again."""
    for tensor in tensors:
        if type(tensor) in PLAIN:
            tensor.__class__ = PLAIN[type(tensor)]


PLAIN: dict[type[torch.Tensor], type[torch.Tensor]] = {OffloadedParameter: nn.Parameter, OffloadedTensor: torch.Tensor}
"""The classes that tensors have when they are not dispatched."""


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation is called with."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found.extend(iter_tensors(value))
    return found


def _device_of_result(
    name: str, operands: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.device | None:
    """Return where operands on the host, or others, must be brought; None if all may stay where they are."""
    devices = {tensor.device for tensor in operands}
    if len(devices) <= 1 or name in ("__set__", "copy_"):
        return None
    written = kwargs.get("out") if "out" in kwargs else args[0] if _writes(name) else None
    if isinstance(written, torch.Tensor):
        return written.device
    return next((device for device in devices if device.type != "cpu"), None)


def _writes(name: str) -> bool:
    """Whether an operation of this name writes to its first operand."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _PLAIN_DUNDERS)
    return name.endswith("_")


def _brought(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device or (device.type != "cpu" and not isinstance(tensor, _Follows)):
        return tensor
    return tensor.to(device)


def _is_read(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> bool:
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", None) not in _VIEWS
    return name in _READS or (name == "clone" and isinstance(args[0], nn.Parameter))


def _following(result: torch.Tensor) -> torch.Tensor:
    return (
        result.as_subclass(OffloadedTensor) if type(result) is torch.Tensor and result.device.type == "cpu" else result
    )
