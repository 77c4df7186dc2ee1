"""Traversal of nested containers (lists, tuples, named tuples, mappings, dataclasses, distributions), moving the
tensors in them, and the memory that a tensor lies in.

`open_container` defines what a container is: its members, and how to rebuild one of the same kind. Every function here
is built on it. Anything it does not open is a leaf: tensors, numbers, text, None, modules, caches.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from .names import torch_device
from .virtual.tensor import VirtualTensor

Predicate = Callable[[Any], bool]


class Container(NamedTuple):
    """The members of a container, and how to rebuild it.

    Attributes:
        keys: Keys of a mapping, names of a dataclass's fields or a distribution's attributes, positions in a sequence.
        members: Its members, in the order of `keys`.
        rebuild: Returns a container of the same kind with the given members, as many as there are keys.
    """

    keys: Sequence[Any]
    members: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def open_container(value: Any, registered: bool = False) -> Container | None:
    """Return the members of `value`; None if it is a leaf.

    Args:
        value: Any object.
        registered: Also open classes registered with `torch.utils._pytree.register_pytree_node`.
    """
    if value is None or isinstance(value, (torch.Tensor, str, bytes, int, float)):
        return None
    if isinstance(value, (list, tuple)):
        return _sequence(value)
    if isinstance(value, Mapping):
        return _mapping(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value)
    if registered and type(value) in _pytree.SUPPORTED_NODES:
        return _registered(value)
    return _distribution(value) if _is_distribution(type(value)) and hasattr(value, "__dict__") else None


def map_leaves(
    function: Callable[[Any], Any],
    value: Any,
    *,
    is_leaf: Predicate | None = None,
    skip_keys: Collection[str] = (),
) -> Any:
    """Return `value` with every leaf replaced by `function(leaf)`.

    A container in which nothing changes is returned as the same object; changed ones are rebuilt, never written to.

    Args:
        function: Called with every leaf, in order.
        value: Containers nested to any depth, or a leaf.
        is_leaf: Predicate; containers for which it is true are treated as leaves.
        skip_keys: Keys of mappings and fields of dataclasses whose members are left unchanged.
    """
    container = None if is_leaf is not None and is_leaf(value) else open_container(value)
    if container is None:
        return function(value)
    new = [
        old
        if isinstance(key, str) and key in skip_keys
        else map_leaves(function, old, is_leaf=is_leaf, skip_keys=skip_keys)
        for key, old in zip(container.keys, container.members)
    ]
    return value if all(one is old for one, old in zip(new, container.members)) else container.rebuild(new)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return `value` with every tensor replaced by `function(tensor)`; see `map_leaves`."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def iter_leaves(value: Any, *, is_leaf: Predicate | None = None, registered: bool = False) -> Iterator[Any]:
    """Yield every leaf of `value`, in the order of `map_leaves`.

    Args:
        value: Containers nested to any depth, or a leaf.
        is_leaf: Predicate; containers for which it is true are treated as leaves.
        registered: As for `open_container`.
    """
    container = None if is_leaf is not None and is_leaf(value) else open_container(value, registered)
    if container is None:
        yield value
        return
    for member in container.members:
        yield from iter_leaves(member, is_leaf=is_leaf, registered=registered)


def iter_tensors(value: Any, *, registered: bool = False) -> Iterator[torch.Tensor]:
    """Yield every tensor in `value`, in the order of `map_leaves`."""
    return (leaf for leaf in iter_leaves(value, registered=registered) if isinstance(leaf, torch.Tensor))


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor in `value`; None if there is none."""
    return next(iter_tensors(value), None)


def flatten(value: Any, registered: bool = False) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Return the leaves of `value`, and a function that builds the same structure from other leaves, equally many.

    The structures it builds share no container with `value` and do not depend on later changes to it.

    Args:
        value: Containers nested to any depth, or a leaf.
        registered: As for `open_container`.
    """
    leaves: list[Any] = []
    make = _flatten_into(leaves, value, registered)
    return leaves, lambda new: make(iter(new))


def _flatten_into(leaves: list[Any], value: Any, registered: bool) -> Callable[[Iterator[Any]], Any]:
    """Append the leaves of `value` to `leaves`; return a function that rebuilds it from an iterator of leaves.

    The function must not refer to `leaves`. A recursive inner function would, in a reference cycle, which keeps tensors
    alive until the next garbage collection.
    """
    container = open_container(value, registered)
    if container is None:
        leaves.append(value)
        return next
    rebuild, inner = container.rebuild, [_flatten_into(leaves, member, registered) for member in container.members]
    return lambda remaining: rebuild([each(remaining) for each in inner])


def send_to_device(
    tensor: Any,
    device: int | str | torch.device,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> Any:
    """Return `tensor` with every tensor in it on `device`.

    Containers are rebuilt only where something in them moves: an argument that is already in place is returned as the
    same object. A tensor that occurs several times is moved once: what was one tensor still is.

    Args:
        tensor: A tensor, or lists, tuples, named tuples, mappings, dataclasses and distributions of them, nested to any
            depth. For other objects their own ``to`` method is called, if they have one; any other value is returned as
            it is.
        device: Target device; an int is the n-th accelerator of this machine.
        non_blocking: Let a copy from pinned memory return before it is complete.
        skip_keys: Keys of mappings whose values stay where they are.
    """
    skip = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    target = torch_device(device) if isinstance(device, int) else torch.device(device)

    moved: dict[int, torch.Tensor] = {}

    def send(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.device == target:
                return leaf
            if id(leaf) not in moved:
                moved[id(leaf)] = copy_to(leaf, target, non_blocking)
            return moved[id(leaf)]
        return leaf.to(target) if moves_itself(leaf) else leaf

    return map_leaves(send, tensor, is_leaf=_is_packed, skip_keys=skip)


def copy_to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
    """Return a tensor on another device with the same strides, also if they leave gaps.

    `Tensor.to` closes gaps, as in the last token of each sequence. Kernels are chosen by strides, too, so that would
    change the last bits of results. Gradients are computed through `Tensor.to`.
    """
    elements = spanned_elements(tensor)
    if elements == tensor.numel() or (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.to(device, non_blocking=non_blocking)
    flat = tensor.as_strided((elements,), (1,))
    return flat.to(device, non_blocking=non_blocking).as_strided(tensor.shape, tensor.stride(), 0)


def spanned_elements(tensor: torch.Tensor) -> int:
    """Return the elements of memory that a copy of `tensor` on another device takes: gaps between its own count."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.numel()
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(spanned, tensor.numel()) if tensor.numel() else 0


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of `tensor` while it exists; 0 if it has none."""
    if isinstance(tensor, VirtualTensor):
        tensor = tensor.held
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # tensor subclasses without a storage of their own
        return 0


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether an element of memory belongs to both of two tensors, of which one may be a view of the other."""
    storage = storage_of(one)
    if not storage or storage != storage_of(other):
        return False
    if one.dtype != other.dtype or not one.layout is other.layout is torch.strided:
        return True
    offsets = [int(each.storage_offset()) for each in (one, other)]
    start = min(offsets)
    length = max(offset + spanned_elements(each) for offset, each in zip(offsets, (one, other))) - start
    positions = torch.arange(length)
    mine, others = (
        positions.as_strided(each.shape, each.stride(), offset - start).flatten()
        for offset, each in zip(offsets, (one, other))
    )
    taken = torch.zeros(length, dtype=torch.bool)
    taken[mine] = True
    return bool(taken[others].any())


def are_all_on(values: Iterable[Any], device: torch.device) -> bool:
    """Whether `values` are only tensors on `device` and plain values, so that nothing needs to move."""
    for value in values:  # noqa: SIM110 (no generator: this is hot)
        if not (value.device == device if isinstance(value, torch.Tensor) else _is_plain(value)):
            return False
    return True


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _is_packed(value: Any) -> bool:
    """Whether `value` is a packed sequence: a named tuple, some of whose tensors must stay on the host."""
    return isinstance(value, PackedSequence)


def moves_itself(value: Any) -> bool:
    """Whether `value` is an object with a ``to`` method of its own."""
    return hasattr(value, "to") and not isinstance(value, (torch.nn.Module, type))


def _sequence(value: Any) -> Container:
    kind = type(value)
    if hasattr(value, "_fields"):
        return Container(value._fields, list(value), lambda members: kind(*members))
    return Container(range(len(value)), list(value), kind)


def _mapping(value: Mapping[Any, Any]) -> Container:
    keys, members = list(value.keys()), list(value.values())
    if type(value) is dict or not isinstance(value, MutableMapping):
        kind: Any = type(value)
        return Container(keys, members, lambda new: kind(dict(zip(keys, new))))
    original = copy.copy(value)

    def rebuild(new: Sequence[Any]) -> Any:
        made = copy.copy(original)
        for key, old, member in zip(keys, members, new):
            if member is not old:
                made[key] = member
        return made

    return Container(keys, members, rebuild)


def _dataclass(value: Any) -> Container:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]

    def rebuild(new: Sequence[Any]) -> Any:
        made = copy.copy(value)
        for name, member in zip(names, new):
            object.__setattr__(made, name, member)  # the class may be frozen
        return made

    return Container(names, [getattr(value, name) for name in names], rebuild)


def _is_distribution(kind: type) -> bool:
    """Whether a class is one of distributions: of PyTorch, or of latents as autoencoders return them."""
    return hasattr(kind, "sample") and hasattr(kind, "mode") and not issubclass(kind, torch.nn.Module)


def _distribution(value: Any) -> Container:
    names = list(vars(value))

    def rebuild(new: Sequence[Any]) -> Any:
        made = copy.copy(value)
        vars(made).update(zip(names, new))
        return made

    return Container(names, list(vars(value).values()), rebuild)


def _registered(value: Any) -> Container:
    node = _pytree.SUPPORTED_NODES[type(value)]
    members, context = node.flatten_fn(value)
    members = list(members)
    return Container(range(len(members)), members, lambda new: node.unflatten_fn(list(new), context))


def tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments, also those that are attributes of objects of any class, as of caches.

    Args:
        value: The arguments.
        seen: Identities of objects that are passed over; those met are added.
    """
    for leaf in iter_leaves(value, registered=True):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, (torch.nn.Module, type)) and hasattr(leaf, "__dict__") and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from tensors_in(vars(leaf), seen)
