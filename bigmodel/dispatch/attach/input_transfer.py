"""Input transfer: the arguments of one call on another device, and the way back for what the call writes into them.

A caller may hand a module something to write into: a list, a dict that later layers read keys and values from, a tensor
that is filled in place. The module gets copies on its own device, so what it has written is put into the originals when
it returns.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ...devices.nested import Container, moves_itself, open_container


class InputTransfer:
    """Moves the arguments of one call to `device`.

    Containers are rebuilt only where something in them moves. What is there several times, a tensor or a container, is
    moved once: what was one object still is.

    Args:
        device: Where tensors go.
        skip_keys: Keyword arguments, keys of mappings in them included, whose values stay where they are.

    Attributes:
        moved: Whether anything had to move.
    """

    def __init__(self, device: torch.device, skip_keys: Collection[str]) -> None:
        self._device = device
        self._skip_keys = skip_keys
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = {}
        self._containers: dict[int, tuple[Any, Any, Container, list[Any]]] = {}

    @property
    def moved(self) -> bool:
        return bool(self._tensors)

    def send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with every tensor in them on the device."""
        return self._sent(args, ()), self._sent(kwargs, self._skip_keys)

    def bring_back(self, output: Any) -> Any:
        """Put what the call has written into the arguments that it was given; return `output`, with these containers
        in the place of their copies."""
        for reference, moved, version in self._tensors.values():
            source = reference() if moved._version != version else None
            if source is not None:
                source.copy_(moved)
        if not self._containers:
            return output
        originals = {id(copy): original for original, copy, _, _ in self._containers.values()}
        for original, copy, container, sent in self._containers.values():
            _write_back(original, copy, container, sent)
        if id(output) in originals:
            return originals[id(output)]
        if type(output) is tuple:
            return tuple(originals.get(id(member), member) for member in output)
        return output

    def _sent(self, value: Any, skip: Collection[str]) -> Any:
        if id(value) in self._containers:
            return self._containers[id(value)][1]
        container = None if isinstance(value, PackedSequence) else open_container(value)
        if container is None:
            return value.to(self._device) if moves_itself(value) else value
        new = []
        for key, old in zip(container.keys, container.members):
            if isinstance(old, torch.Tensor):
                stays = old.device == self._device or (key in skip if isinstance(key, str) else False)
                new.append(old if stays else self._copy(old))
            elif old is None or isinstance(old, (bool, int, float, str)) or (isinstance(key, str) and key in skip):
                new.append(old)
            else:
                new.append(self._sent(old, skip))
        if all([one is old for one, old in zip(new, container.members)]):  # noqa: C419 (no generator: this is hot)
            return value
        made = container.rebuild(new)
        if _is_mutable(value):
            self._containers[id(value)] = value, made, container, new
        return made

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._tensors.get(id(tensor))
        if known is None:
            copy = _counting(tensor, self._device) if torch.is_inference_mode_enabled() else tensor.to(self._device)
            # A tensor that nobody else holds is freed as early as without this.
            known = self._tensors[id(tensor)] = weakref.ref(tensor), copy, copy._version
        return known[1]


def _counting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy that counts how often it is written to, as tensors of inference mode do not."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(tensor, device=device, requires_grad=False).copy_(tensor)


def _is_mutable(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return not value.__dataclass_params__.frozen  # type: ignore[union-attr]
    return isinstance(value, (list, MutableMapping))


def _write_back(original: Any, copy: Any, container: Container, sent: list[Any]) -> None:
    """Have `original` hold what `copy` holds now: what it was sent with as it was, what the call put there as it is."""
    was = {id(new): old for new, old in zip(sent, container.members)}
    if isinstance(original, list):
        if len(copy) != len(sent) or any(one is not other for one, other in zip(copy, sent)):
            original[:] = [was.get(id(member), member) for member in copy]
        return
    before = dict(zip(container.keys, sent))
    if isinstance(original, MutableMapping):
        for key in [key for key in before if key not in copy]:
            del original[key]
        for key, member in copy.items():
            if key not in before or before[key] is not member:
                original[key] = was.get(id(member), member)
        return
    for field in dataclasses.fields(original):
        member = getattr(copy, field.name, None)
        if before.get(field.name) is not member:
            setattr(original, field.name, was.get(id(member), member))
