"""Offloaded weights in operations with accelerator tensors, outside the forward of their unit.

While a unit runs, its modules refer to copies on the device. Code outside it may use the same weights: a parent that
computes with a child's weight, a method other than ``forward``, a child that is called by itself. This code gets the
host tensors. They are of tensor subclasses that implement ``__torch_function__``: an operation that mixes them with
accelerator tensors uses copies on the accelerator. An operand that is written in place keeps its device, and the other
operands are copied to it. Results on the host, such as slices, transposed views and sums, are of a subclass, too.

With several devices, weights that stay where they are may be used by code that runs elsewhere. Those that
`placement.lent` finds are of such subclasses as well: they are copied to the device of the other operands.

Tensors keep their identity: only their class changes, and changes back when the model is undispatched. Inside the
forward of their unit none of this code runs.

Forwards return before the copies that they have queued are done. Code that writes to a weight on the host, or is given
its memory, therefore waits for the copies under way: else these would copy some of what it writes.

Some code writes to a weight without increasing its version counter: through ``.data``, through an array of numpy, in
kernels of fused optimizers. Blocks that are on the device would be used as they were. What gives out a weight's memory
is therefore counted here (`EXPOSURES`), and so are the steps of optimizers. As long as an array, or anything else that
was given out, refers to that memory (`is_given_out`), what is fetched is used by one call of the model only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.optim.optimizer import Optimizer

from ...devices import HOST, wait_for_copies
from ...devices.nested import iter_tensors, map_tensors
from ...devices.virtual import VirtualTensor

_READS = frozenset(
    ("detach", "to", "cpu", "cuda", "type", "numpy", "tolist", "item", "__deepcopy__", "__reduce_ex__", "__iter__")
)
"""Functions that read a tensor's value: their results are plain tensors. So are clones of parameters."""

_VIEWS = frozenset(("T", "H", "mT", "mH", "real", "imag"))
"""Attributes that are views to compute with, unlike ``.data`` and ``.grad``."""

_ON_ANY_DEVICES = frozenset(("__set__", "copy_", "grad", "backward"))
"""Functions that take tensors of several devices, those of ``torch.autograd`` among them."""

_PLAIN_DUNDERS = frozenset(("__invert__", "__index__", "__int__"))

_GIVES_MEMORY = frozenset(("detach", "numpy", "__array__", "__dlpack__"))
"""Functions whose result lets code write to a tensor without increasing its version counter, at once or by an array
that is made of it. So does ``.data``. Kernels that are given an address (``data_ptr``) are those of optimizers, whose
steps are counted."""

EXPOSURES = "_bigmodel_exposures"
"""Attribute of a host tensor: how often it may have been written to without increasing its version counter."""

_USES_BEFORE = "_bigmodel_uses_before"
"""Attribute of a host tensor whose memory was given out: how many tensors used that memory before."""


def note_exposure(tensor: torch.Tensor) -> None:
    """Count that `tensor` may have been written to, or is about to be, without increasing its version counter."""
    setattr(tensor, EXPOSURES, getattr(tensor, EXPOSURES, 0) + 1)


def _give_out(tensor: torch.Tensor, others: int) -> None:
    """Note that the memory of `tensor` is about to be given out, while `others` uses of it are known."""
    owner = tensor if tensor._base is None else tensor._base
    if owner.device.type != HOST:  # it is not fetched from there
        return
    note_exposure(owner)
    setattr(owner, _USES_BEFORE, min(others, getattr(owner, _USES_BEFORE, others)))


def is_given_out(tensor: torch.Tensor) -> bool:
    """Whether something holds the memory of a host tensor that can write there and increase no version counter, such as
    an array."""
    before = tensor.__dict__.get(_USES_BEFORE)
    if before is None or _uses(tensor) > before:
        return before is not None
    tensor.__dict__.pop(_USES_BEFORE, None)
    return False


def _uses(tensor: torch.Tensor) -> int:
    """Return how many tensors, arrays and storages refer to the memory of a tensor."""
    with DisableTorchFunctionSubclass():
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_SOLE_USE = _uses(torch.empty(1))


def host_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor detached, for code that does not write to it: its memory does not count as given out."""
    if not isinstance(tensor, _Offloaded):
        return tensor.detach()
    with DisableTorchFunctionSubclass():
        return tensor.detach()


def note_optimizer_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Count the parameters on the host of an optimizer that has made a step: fused kernels increase no counter."""
    with DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.device.type == HOST:
                    note_exposure(parameter)


class _Offloaded:
    """Mixin of host tensors that are copied to the device of the other operands."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            kwargs = kwargs or {}
            name = func.__name__
            operands = _operands(args, kwargs)
            gives_memory = name in _GIVES_MEMORY or _is_data(func, name)
            if gives_memory or _writes(name) or "out" in kwargs:
                wait_for_copies()  # forwards that have returned may still copy the weight to where they compute
            if gives_memory:
                _give_out(args[0], _SOLE_USE if name == "__set__" else _uses(args[0]))
            if _recording.used is not None and name != "detach" and not _is_attribute(func, name):
                _recording.used += [each for each in operands if isinstance(each, OffloadedParameter)]
            target = _device_of_result(name, operands, args, kwargs)
            if target is not None:
                args, kwargs = map_tensors(lambda tensor: _on_device(tensor, target), (args, kwargs))
            result = func(*args, **kwargs)
            if _writes(name) or "out" in kwargs or _is_read(func, name, args):
                return result
            marked = [each for each in operands if isinstance(each, _Offloaded)]
            if not any(type(each) in _LENT_CLASSES for each in marked):
                return map_tensors(_as_offloaded, result)
            return map_tensors(_as_lent, result) if len(marked) == len(operands) else result


class _Recording(threading.local):
    """The offloaded parameters that the calling thread has used; None while they are not recorded."""

    used: list[torch.Tensor] | None = None


_recording = _Recording()


@contextmanager
def recorded_uses() -> Iterator[list[torch.Tensor]]:
    """Within this context, record which offloaded parameters the calling thread computes with; some several times."""
    outer, _recording.used = _recording.used, []
    try:
        yield _recording.used
    finally:
        if outer is not None:
            outer += _recording.used
        _recording.used = outer


class OffloadedParameter(_Offloaded, nn.Parameter):
    """A parameter on the host."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(torch.Tensor._make_subclass(nn.Parameter, host_value(self), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), nn.Parameter(host_value(self).clone(), self.requires_grad))


class OffloadedTensor(_Offloaded, torch.Tensor):
    """A buffer on the host."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(_plain(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        plain = _plain(self)
        plain.data = plain.data.clone()
        return memo.setdefault(id(self), plain)

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plain(self).__reduce_ex__(proto)


class OffloadedResult(OffloadedTensor):
    """A result computed on the host from an offloaded tensor, such as an optimizer's state; also once it is detached,
    or made a parameter."""


class LentParameter(_Offloaded, nn.Parameter):
    """A parameter that stays on its device and is used by code that runs on another."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), _copied(self))


class LentTensor(_Offloaded, torch.Tensor):
    """Such a buffer, or what is computed from such weights alone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), _copied(self))

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plain(self).__reduce_ex__(proto)


class LentVirtual(_Offloaded, VirtualTensor):
    """Either of these, on a virtual accelerator."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), _copied(self))


_LENT: dict[type[torch.Tensor], type[torch.Tensor]] = {
    nn.Parameter: LentParameter,
    torch.Tensor: LentTensor,
    VirtualTensor: LentVirtual,
}
_LENT_CLASSES = frozenset(_LENT.values())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        copy = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy.requires_grad_(tensor.requires_grad)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the value of an offloaded tensor, in the same memory, as a plain tensor or parameter."""
    with DisableTorchFunctionSubclass():
        value = tensor.detach().as_subclass(torch.Tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(value, tensor.requires_grad) if is_parameter else value.requires_grad_(tensor.requires_grad)


def mark_offloaded(tensors: Iterable[torch.Tensor]) -> None:
    """Change the class of plain parameters and tensors to the offloaded one; other subclasses stay as they are."""
    for tensor in tensors:
        if type(tensor) is nn.Parameter:
            tensor.__class__ = OffloadedParameter
        elif type(tensor) is torch.Tensor:
            tensor.__class__ = OffloadedTensor


def mark_lent(tensors: Iterable[torch.Tensor]) -> None:
    """Change the class of plain parameters and tensors to that of weights which code on other devices may use; other
    subclasses stay as they are."""
    for tensor in tensors:
        if type(tensor) in _LENT:
            tensor.__class__ = _LENT[type(tensor)]


def is_marked(tensor: object) -> bool:
    """Whether something is a tensor of an offloaded class."""
    return isinstance(tensor, _Offloaded)


def unmark_offloaded(tensors: Iterable[torch.Tensor]) -> None:
    """Change offloaded tensors back to their plain class."""
    for tensor in tensors:
        for attribute in (EXPOSURES, _USES_BEFORE):
            tensor.__dict__.pop(attribute, None)
        if type(tensor) in PLAIN:
            is_parameter = isinstance(tensor, nn.Parameter) and not isinstance(tensor, VirtualTensor)
            tensor.__class__ = nn.Parameter if is_parameter else PLAIN[type(tensor)]


PLAIN: dict[type[torch.Tensor], type[torch.Tensor]] = {
    OffloadedParameter: nn.Parameter,
    OffloadedTensor: torch.Tensor,
    OffloadedResult: torch.Tensor,
    **{lent: plain for plain, lent in _LENT.items()},
}
"""The plain class of each offloaded one."""


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of an operation."""
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
    """Return the device to which offloaded operands, or those of an in-place operation, are copied; None for none: the
    accelerator of the operands that are no weights; the host, if these are there; else that of the first weight that is
    on an accelerator."""
    devices = dict.fromkeys(tensor.device for tensor in operands)
    if len(devices) <= 1 or name in _ON_ANY_DEVICES:
        return None
    written = kwargs.get("out") if "out" in kwargs else args[0] if _writes(name) else None
    if isinstance(written, torch.Tensor):
        return written.device
    others = dict.fromkeys(tensor.device for tensor in operands if tensor.dim() and not isinstance(tensor, _Offloaded))
    if name != "__getitem__" and [device.type for device in others] == [HOST]:
        return next(iter(others))
    return next((device for device in (*others, *devices) if device.type != HOST), None)


def brought_together(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the operands of a function of autograd, with copies of those marked ones that get gradients on the device
    where it computes: a function that is given a weight on the host itself would have to return its gradient there."""
    with DisableTorchFunctionSubclass():
        tensors = _operands(operands, {})
        target = _device_of_result("apply", tensors, operands, {})
        brought = [target is not None and is_marked(each) and each.requires_grad for each in operands]
    return tuple(each.to(target) if copied else each for each, copied in zip(operands, brought, strict=True))


def _writes(name: str) -> bool:
    """Whether an operation of this name writes to its first operand."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _PLAIN_DUNDERS)
    return name.endswith("_")


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an operand for an operation on `device`: a copy of it if it is offloaded, or if the target is the host."""
    if tensor.device == device or (device.type != "cpu" and not isinstance(tensor, _Offloaded)):
        return tensor
    return tensor.to(device)


def _is_read(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> bool:
    """Whether the result of a function is a plain tensor: a value that is read, not an operand."""
    if name == "detach" and isinstance(args[0], OffloadedResult):
        return False
    return _is_attribute(func, name) or name in _READS or (name == "clone" and isinstance(args[0], nn.Parameter))


def _is_data(func: Callable[..., Any], name: str) -> bool:
    """Whether a function gets or sets ``.data``."""
    return name in ("__get__", "__set__") and getattr(getattr(func, "__self__", None), "__name__", None) == "data"


def _is_attribute(func: Callable[..., Any], name: str) -> bool:
    """Whether a function gets an attribute that is not a view."""
    return name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", None) not in _VIEWS


def _as_offloaded(result: torch.Tensor) -> torch.Tensor:
    is_plain = type(result) is torch.Tensor and result.device.type == "cpu"
    return result.as_subclass(OffloadedResult) if is_plain else result


def _as_lent(result: torch.Tensor) -> torch.Tensor:
    """Return what is computed from weights alone, as a tensor that is brought to others as they are."""
    if type(result) in _LENT:
        result.__class__ = _LENT[type(result)]
    return result
