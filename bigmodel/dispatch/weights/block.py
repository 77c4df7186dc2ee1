"""A streamed block: weights that lie on the host and visit the device for the time of one forward.

Between forwards every parameter of the block is the host tensor it was placed as. During a forward the module's
slots in ``_parameters`` (or ``_buffers``) hold views of device memory instead. Nothing is ever on meta.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from ...checkpoint import mapped_region
from ...devices import HOST
from ...devices.forks import new_rlock
from ...errors import DispatchError
from .layout import Layout
from .outside_use import follow, follows
from .parameters import SecondPlace, like

Registry = dict[str, Any]
"""A module's own ``_parameters`` or ``_buffers``. Held instead of the module, so that no cycle keeps it alive."""


@dataclass
class HostTensor:
    """One tensor of a block: the host tensor, and every place in the model that refers to it.

    Attributes:
        value: The tensor on the host.
        device_dtype: What it is cast to on the device.
        owners: The registries and keys that refer to it.
        is_buffer: It is state that a forward may write, and is copied back after each one.
        name: Its name in the model, the first of several.
        second_places: Where else recurrent layers refer to it.
    """

    value: torch.Tensor
    device_dtype: torch.dtype
    owners: list[tuple[Registry, str]] = field(default_factory=list)
    is_buffer: bool = False
    name: str = ""
    second_places: list[SecondPlace] = field(default_factory=list)

    def show(self, tensor: torch.Tensor) -> None:
        """Make every owner refer to `tensor`."""
        for registry, name in self.owners:
            registry[name] = tensor
        for weights, place in self.second_places:
            weights[place] = tensor


class Block:
    """The tensors of one streamed module and how they lie side by side in a packed buffer.

    Args:
        name: The module's name in the model.
        tensors: Its tensors, each once, in the order in which they lie there.
    """

    def __init__(self, name: str, tensors: list[HostTensor]) -> None:
        self.name = name
        self.tensors = tensors
        self.layout = Layout.of((t.device_dtype, t.value.shape) for t in tensors)
        self.has_state = any(t.is_buffer for t in tensors)
        self.casts = any(t.device_dtype != t.value.dtype for t in tensors)
        self.nbytes = sum(t.value.nbytes for t in tensors)
        self.packed: torch.Tensor | None = None
        self._on_disk: bool | None = None
        self.encloses = False
        """Other blocks run within this one's forward, so it must not occupy a slot that they wait for."""
        self.recomputed_by: int | None = None
        """The thread that computes the block once more for its gradients now."""
        self._recomputing = new_rlock()
        self.nested: list[HostTensor] = []
        """Tensors within the module that are no part of the block but fetched by themselves, as experts are."""

    def __repr__(self) -> str:
        return f"Block({self.name!r}, {len(self.tensors)} tensors, {self.layout.nbytes} bytes)"

    @property
    def on_disk(self) -> bool:
        """Whether any of its tensors views a memory-mapped file."""
        if self._on_disk is None:
            self._on_disk = any(mapped_region(t.value) is not None for t in self.tensors)
        return self._on_disk

    def pack(self, pin: bool) -> None:
        """Move the host tensors into one packed (pinned) buffer of their own, so that one copy fetches them.

        The tensors keep their identity: a Parameter stays the same Parameter. Blocks whose tensors are cast on the
        way, are tied to other places or lie in a memory map stay as they are.
        """
        packed = torch.empty(self.layout.nbytes, dtype=torch.uint8, device=HOST, pin_memory=pin)
        for tensor, view in zip(self.tensors, self.layout.views(packed)):
            view.copy_(tensor.value.detach())
            tensor.value.data = view
        self.packed = packed

    def version(self) -> int:
        """Return a number that grows whenever a host tensor is written in place (other than through ``.data``)."""
        with DisableTorchFunctionSubclass():
            try:
                return sum([t.value._version for t in self.tensors])
            except RuntimeError:
                return sum(version_of(t.value) for t in self.tensors)

    def adopt_replaced(self) -> bool:
        """Take over parameters that the user put in the place of the host tensors; return whether there were any.

        Raises:
            DispatchError: A replacement has another shape or dtype, or lies on another device.
        """
        replaced = False
        for tensor in self.tensors:
            registry, key = tensor.owners[0]
            current = registry.get(key)
            if current is tensor.value:
                continue
            if current is None or _kind(current) != _kind(tensor.value):
                raise DispatchError(
                    f"{key!r} of {self.name!r} was removed or replaced by a tensor of another shape, dtype or device "
                    "while the model is dispatched; call undispatch(model) first"
                )
            if follows(tensor.value):
                follow([current])
            tensor.value, self.packed, self._on_disk, replaced = current, None, None, True
            tensor.show(current)
        return replaced

    def device_views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return what the module sees while its weights are in `memory`: parameters or buffers viewing it."""
        return [like(t.value, view, requires_grad=False) for t, view in zip(self.tensors, self.layout.views(memory))]

    def fetch(self, memory: torch.Tensor) -> None:
        """Copy the block's tensors into `memory`, in as few copies as they allow."""
        if self.packed is not None:
            whole = memory if memory.numel() == self.layout.nbytes else memory[: self.layout.nbytes]
            whole.copy_(self.packed, non_blocking=True)
            return
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for tensor, view in zip(self.tensors, self.layout.views(memory)):
                view.copy_(tensor.value.detach(), non_blocking=True)

    def show(self, tensors: list[torch.Tensor]) -> None:
        """Make the model refer to these tensors, one for each of the block's own."""
        for tensor, shown in zip(self.tensors, tensors):
            tensor.show(shown)

    def keep_state(self) -> None:
        """Copy what a forward has written into the buffers that the model refers to, or put there, to the host.

        Raises:
            DispatchError: A buffer was removed, or another has taken its place that does not fit.
        """
        if not self.has_state:
            return
        with torch.no_grad():
            for tensor in self.tensors:
                if tensor.is_buffer:
                    registry, key = tensor.owners[0]
                    current = registry.get(key)
                    if current is None or (current.shape, current.dtype) != (tensor.value.shape, tensor.device_dtype):
                        raise DispatchError(
                            f"{key!r} of {self.name!r} was removed or changed its shape or dtype in the forward, which "
                            "a buffer that is streamed cannot: dispatch the model with offload_buffers=False"
                        )
                    tensor.value.copy_(current)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Within this context the calling thread alone computes the block once more for its gradients."""
        with self._recomputing:
            self.recomputed_by = threading.get_ident()
            try:
                yield
            finally:
                self.recomputed_by = None

    def show_host(self) -> None:
        """Make the model refer to the host tensors again."""
        for tensor in self.tensors:
            tensor.show(tensor.value)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place; 0 for those of inference mode, where nobody counts."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
