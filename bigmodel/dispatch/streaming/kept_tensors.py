"""Tensors that a streamed block keeps after its forward: it hands them on in attributes instead of its output.

The first computation of a block has no graph, so that a gradient for such a tensor would be lost. Each that depends on
a weight or an input with a gradient is found, and refuses the gradient that reaches it in backward. Most blocks keep
none, which shows in their first forward; after it they are followed again only if an attribute that held no tensor then
holds one (`attributes_with_tensors`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...devices.nested import iter_leaves, iter_tensors
from ...errors import DispatchError
from ...profile import storage_key
from ...profile.training.recompute import leaves_of


class FollowedTensors(TorchDispatchMode):
    """Follows which tensors are computed from some, within its context, in this thread.

    Args:
        sources: tensors that gradients flow to.
    """

    def __init__(self, sources: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._found: dict[int, weakref.ref[torch.Tensor]] = {}
        self._add(sources)
        self._given = set(self._found)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation would import Dynamo; what calls this is not traced anyway

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default and any(
            self._is_found(tensor) for tensor in iter_tensors((args, kwargs or {}))
        ):
            self._add(tensor for tensor in iter_tensors(output) if tensor.is_floating_point())
        return output

    def kept(self, known: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the computed tensors that are still alive, without those that share memory with `known` ones."""
        storages = {storage_key(tensor) for tensor in known}
        alive = (reference() for key, reference in self._found.items() if key not in self._given)
        return [tensor for tensor in alive if tensor is not None and storage_key(tensor) not in storages]

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        self._found.update((id(tensor), weakref.ref(tensor)) for tensor in tensors)

    def _is_found(self, tensor: torch.Tensor) -> bool:
        reference = self._found.get(id(tensor))
        return reference is not None and reference() is tensor


def refuse_gradients_of_kept(name: str, followed: FollowedTensors, module: nn.Module, passed: Any) -> bool:
    """Have what a block has kept refuse gradients, and return whether it has kept anything.

    Args:
        name: the block's name.
        followed: its computation, which has ended.
        module: its module.
        passed: its arguments and its output, nested.
    """
    cached = [vars(layer) for each in iter_leaves(passed, registered=True) for layer in _layers(each)]
    known = [*iter_tensors(passed, registered=True), *iter_tensors(cached), *module.parameters(), *module.buffers()]
    kept = followed.kept(known)
    for tensor in kept:
        tensor.requires_grad_().register_hook(partial(_refuse, name))
        _kept[tensor] = name
    return bool(kept)


def attributes_with_tensors(module: nn.Module) -> frozenset[tuple[str, ...]]:
    """Return the attributes of a module and its children, parameters and buffers apart, that hold tensors: as such, in
    lists, dicts and tuples, or in attributes of other objects that they hold."""
    found: set[tuple[str, ...]] = set()
    waiting: list[tuple[tuple[str, ...], object]] = [
        ((part_name, name), value)
        for part_name, part in module.named_modules()
        for name, value in list(vars(part).items())
        if name not in _OF_MODULES
    ]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.add(path)
        elif type(value) in _PLAIN or id(value) in seen:
            continue
        elif isinstance(value, (list, tuple, set)):
            waiting += [(path, each) for each in list(value)]
        elif isinstance(value, Mapping):
            waiting += [(path, each) for each in list(value.values())]
        elif not callable(value) and type(value).__module__.partition(".")[0] not in _OWN:
            waiting += [((*path, name), each) for name, each in list(getattr(value, "__dict__", {}).items())]
        seen.add(id(value))
    return frozenset(found)


_OF_MODULES = frozenset(vars(nn.Module()))
_OWN = ("bigmodel", "torch")
"""Packages whose objects are not looked into."""

_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))

_kept: Any = WeakTensorKeyDictionary()
"""The name of the block that has kept a tensor."""


def refuse_kept_in(graph: Iterable[torch.Tensor]) -> None:
    """Raise DispatchError if tensors were computed, with gradients, from what a block has kept."""
    for leaf in leaves_of(graph):
        name = _kept.get(leaf)
        if name is not None:
            raise _error(name)


def _layers(value: Any) -> list[Any]:
    """Return the layers of a key-value cache: keys and values in it are read by the block alone."""
    layers = getattr(value, "layers", None)
    return layers if isinstance(layers, list) else []


def _refuse(name: str, _gradient: torch.Tensor) -> None:
    """Have the running backward raise at its end: autograd's engine does not pass on what hooks of leaves raise."""

    def raise_error() -> NoReturn:
        raise _error(name)

    torch.autograd.Variable._execution_engine.queue_callback(raise_error)


def _error(name: str) -> DispatchError:
    return DispatchError(
        f"{name!r}, which is streamed, hands a tensor on in an attribute instead of its output, through which no "
        "gradient would flow: map it to an accelerator, return the tensor, or detach it"
    )
