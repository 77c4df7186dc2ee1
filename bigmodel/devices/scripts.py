"""Functions of TorchScript that call ``__torch_function__``, as other functions of PyTorch do.

PyTorch runs scripted and traced functions without asking the tensors that these are given, nor a `TorchFunctionMode`.
While somebody asks for it (`OverriddenScripts`), their class calls both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

from .nested import iter_tensors

T = TypeVar("T")

_OWN: Callable[..., Any] = vars(torch.jit.ScriptFunction)["__call__"]


class ReplacedMethod(Generic[T]):
    """Replaces a method of a class while anybody asks for it.

    Args:
        owner: The class.
        name: Name of the method; the class may inherit it.
        other: What takes its place.

    Attributes:
        asking: All who ask.
    """

    def __init__(self, owner: type, name: str, other: Any) -> None:
        self.asking: list[T] = []
        self._owner = owner
        self._name = name
        self._other = other
        self._own = vars(owner).get(name)
        self._lock = RLock()  # one who asks may be collected, which takes it back, while the lock is held

    def add(self, asks: T) -> None:
        """Replace the method from now until `remove` is called with the same object."""
        self._change(lambda asking: [*asking, asks])

    def remove(self, asks: T) -> None:
        """Take it back; a second time changes nothing."""
        self._change(lambda asking: [each for each in asking if each is not asks])

    def _change(self, change: Callable[[list[T]], list[T]]) -> None:
        with self._lock:
            before, self.asking = self.asking, change(self.asking)
            if self.asking:
                setattr(self._owner, self._name, self._other)
            elif self._own is not None:
                setattr(self._owner, self._name, self._own)
            elif before:
                delattr(self._owner, self._name)


class OverriddenScripts:
    """From now until `remove` is called, functions of TorchScript can be overridden if they are given certain tensors.

    Args:
        wants: Whether a tensor is one of these.
    """

    def __init__(self, wants: Callable[[torch.Tensor], bool]) -> None:
        self.wants = wants
        _replaced.add(self)

    def remove(self) -> None:
        """Take it back; a second time changes nothing."""
        _replaced.remove(self)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = tuple(iter_tensors((args, kwargs)))
    if any(each.wants(tensor) for each in _replaced.asking for tensor in tensors) and has_torch_function(tensors):
        return handle_torch_function(_Scripted(self, tensors), tensors, *args, **kwargs)
    return _OWN(self, *args, **kwargs)


_replaced: ReplacedMethod[OverriddenScripts] = ReplacedMethod(torch.jit.ScriptFunction, "__call__", _call)


class _Scripted:
    """One call of a function of TorchScript. What it writes into copies reaches the tensors that they are copies of.

    Args:
        function: The function.
        sources: The tensors that its caller gives it.
    """

    def __init__(self, function: Any, sources: Sequence[torch.Tensor]) -> None:
        self.__name__ = "scripted"
        self._function = function
        self._sources = sources

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pairs = zip(iter_tensors((args, kwargs)), self._sources)
        copies = [(copy, source, _version(copy)) for copy, source in pairs if copy is not source]
        output = _OWN(self._function, *args, **kwargs)
        for copy, source, version in copies:
            if self._writes_in_place() if version is None else copy._version != version:
                source.copy_(copy.to(source.device))
        return output

    def _writes_in_place(self) -> bool:
        return re.search(r" aten::\w+_\(", str(self._function.inlined_graph)) is not None


def _version(tensor: torch.Tensor) -> int | None:
    """Return a tensor's version counter; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version
