"""A streamed block: weights that are stored on the host and copied to the device for the duration of one forward.

Between forwards every parameter of the block is its host tensor. During a forward the module's entries in
``_parameters`` (or ``_buffers``) are views of device memory instead. No tensor is ever on meta.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from ...checkpoint import mapped_region
from ...devices import HOST
from ...devices.forks import new_rlock
from ...devices.nested import storage_of
from ...devices.pinned import empty_weights, is_pinned
from ...errors import DispatchError
from .layout import Layout, strides_when_moved
from .outside_use import EXPOSURES, host_value, is_given_out, is_marked, mark_offloaded
from .parameters import SecondPlace, is_cast_in_forward, like, was_written_since_cast

Registry = dict[str, Any]
"""A module's own ``_parameters`` or ``_buffers``. Referenced instead of the module, to avoid reference cycles."""


@dataclass
class HostTensor:
    """One tensor of a block: the host tensor, and every reference of the model to it.

    Attributes:
        value: The tensor on the host.
        device_dtype: Its dtype on the device.
        owners: The registries and keys that refer to it.
        is_buffer: Whether a forward may write it; it is then copied back after each forward.
        name: Its first name in the model.
        second_places: Further references in recurrent layers.
        kind: Shape, dtype and device that `value` has to keep.
        exposures: How often its memory had been given out (`EXPOSURES`) at the last check.
    """

    value: torch.Tensor
    device_dtype: torch.dtype
    owners: list[tuple[Registry, str]] = field(default_factory=list)
    is_buffer: bool = False
    name: str = ""
    second_places: list[SecondPlace] = field(default_factory=list)
    kind: tuple[object, ...] = field(init=False)
    exposures: int = field(init=False)

    def __post_init__(self) -> None:
        self.kind, self.exposures = _kind(self.value), getattr(self.value, EXPOSURES, 0)

    def show(self, tensor: torch.Tensor) -> None:
        """Make every owner refer to `tensor`."""
        for registry, name in self.owners:
            registry[name] = tensor
        for place in self.second_places:
            place.show(tensor)


class Block:
    """The tensors of one streamed module, and their layout in a packed buffer.

    Args:
        name: The module's name in the model.
        tensors: Its tensors, each once, in the order of the layout.
    """

    def __init__(self, name: str, tensors: list[HostTensor]) -> None:
        self.name = name
        self.tensors = tensors
        with DisableTorchFunctionSubclass():
            strides = [strides_when_moved(t.value) for t in tensors]
        self.layout = Layout.of(((t.device_dtype, t.value.shape) for t in tensors), strides)
        self.has_state = any(t.is_buffer for t in tensors)
        self.casts = any(t.device_dtype != t.value.dtype for t in tensors)
        self.nbytes = sum(t.value.nbytes for t in tensors)
        self.packed: torch.Tensor | None = None
        self._on_disk: bool | None = None
        self._is_pinned: bool | None = None
        self.uses_data = False
        """Whether its forward may write into parameters through ``.data``, which no version counter counts."""
        self._was_given_out = False
        self.is_plain = False
        """Whether its weights are of PyTorch's own classes, which do not tell of writes past their version counters."""
        self.encloses = False
        """Whether other blocks run within this one's forward; it must then not occupy a slot that they wait for."""
        self.recomputed_by: int | None = None
        """The thread that is recomputing the block for its gradients."""
        self._recomputing = new_rlock()
        self.registries_of_buffers: list[Registry] | None = None
        """Registries of the block's modules that have buffers; None until a forward has looked."""
        self.has_fast_path: bool | None = None
        """Whether it holds modules of PyTorch that compute otherwise where gradients are off, once it was looked."""
        self.resident: list[tuple[Registry, str]] = []
        """Where its modules have parameters that stay on the device, being tied to those of resident modules."""
        self.written_buffers: set[tuple[int, str]] | None = None
        """Registries, by id, and names of the buffers that its forward writes; None until one has shown."""
        self.keeps_tensors: bool | None = None
        """Whether its forward hands tensors on in attributes; None until a forward with gradients has shown."""
        self.attributes_with_tensors: frozenset[tuple[str, ...]] = frozenset()
        """The attributes of its modules that held tensors after the last forward that was followed to see that."""
        self.earlier: dict[int, dict[int, torch.Tensor]] = {}
        """For each forward that asks, by the id of what it is given: the values, by index in `tensors`, that parameters
        had before a forward wrote them."""
        self.keeps_views: bool | None = None
        """Whether its forward keeps views of its weights; None until a forward has shown."""
        self.module: Callable[[], nn.Module | None] = lambda: None
        """Returns the streamed module, which is referenced weakly, as long as there is one."""
        self.nested: list[HostTensor] = []
        """Parameters of the module that are fetched separately: experts, adapters; not part of `tensors`."""

    def __repr__(self) -> str:
        return f"Block({self.name!r}, {len(self.tensors)} tensors, {self.layout.nbytes} bytes)"

    def modules(self) -> Iterable[nn.Module]:
        """Return the modules whose forward the block is on the device for."""
        module = self.module()
        if module is None:
            return ()
        return (module,) if self.encloses else module.modules()

    @property
    def on_disk(self) -> bool:
        """Whether any of its tensors views a memory-mapped file."""
        if self._on_disk is None:
            self._on_disk = any(mapped_region(t.value) is not None for t in self.tensors)
        return self._on_disk

    @property
    def is_pinned(self) -> bool:
        """Whether it is packed, in pinned memory."""
        if self._is_pinned is None:
            self._is_pinned = self.packed is not None and is_pinned(self.packed)
        return self._is_pinned

    @property
    def unwatched(self) -> bool:
        """Whether its weights may be written to without a trace. What is fetched is then used by one call of the model
        only."""
        if self._was_given_out and not self.is_plain:
            self._was_given_out = any([is_given_out(t.value) for t in self.tensors])  # noqa: C419 (drops all that ended)
        return self.is_plain or self._was_given_out

    def pack(self, pin: bool) -> None:
        """Move the host tensors into one packed buffer, optionally pinned, so that one copy fetches them.

        Parameters stay the same objects. Not for tensors that are cast, tied to other blocks or in a mapped file.
        """
        packed = empty_weights(self.layout.nbytes, pin)
        for tensor, view in zip(self.tensors, self.layout.views(packed)):
            view.copy_(host_value(tensor.value))
            tensor.value.data = view
        self.packed, self._is_pinned = packed, None

    def version(self) -> int:
        """Return a number that increases whenever the host tensors may have been written to."""
        with DisableTorchFunctionSubclass():
            try:
                return sum([t.value._version + getattr(t.value, EXPOSURES, 0) for t in self.tensors])
            except RuntimeError:
                return sum(content_version(t.value) for t in self.tensors)

    def take_separately(self, parameters: list[HostTensor]) -> None:
        """Have `parameters` be those that are fetched separately, as the module has other parts now."""
        self.nested = parameters
        self.registries_of_buffers = self.written_buffers = self.keeps_tensors = None

    def adopt_replaced(self) -> tuple[bool, int]:
        """Adopt parameters, and memory (``.data = ...``), by which the user has replaced host tensors'.

        Returns:
            Whether there were any, and the `version` after that.

        Raises:
            DispatchError: A replacement has another shape or dtype, or lies on another device.
        """
        version = self._version_unless_replaced()
        return (False, version) if version is not None else (self._adopt_replaced(), self.version())

    def _version_unless_replaced(self) -> int | None:
        """Return the `version`; None if a tensor may have been replaced, or has no version counter."""
        version = 0
        with DisableTorchFunctionSubclass():
            try:
                for tensor in self.tensors:  # once for both: this is hot
                    registry, key = tensor.owners[0]
                    value = tensor.value
                    exposures = getattr(value, EXPOSURES, 0)
                    if registry.get(key) is not value or exposures != tensor.exposures:
                        return None
                    version += value._version + exposures
            except RuntimeError:  # an inference tensor
                return None
        return version

    def _adopt_replaced(self) -> bool:
        replaced = False
        for tensor in self.tensors:
            registry, key = tensor.owners[0]
            current = registry.get(key)
            if current is tensor.value:
                exposures = getattr(current, EXPOSURES, 0)
                if exposures == tensor.exposures or not self._has_moved(tensor, exposures):
                    continue
            if current is None or _kind(current) != tensor.kind:
                raise DispatchError(
                    f"{key!r} of {self.name!r} was removed or replaced by a tensor of another shape, dtype or device "
                    "while the model is dispatched; call undispatch(model) first"
                )
            if is_marked(tensor.value):
                mark_offloaded([current])
            tensor.value, replaced = current, True
            self.packed = self._on_disk = self._is_pinned = None
            self._was_given_out = True
            tensor.exposures = getattr(current, EXPOSURES, 0)
            tensor.show(current)
        return replaced

    def _has_moved(self, tensor: HostTensor, exposures: int) -> bool:
        """Whether a tensor, whose memory was given out, is no longer in the memory that the block is fetched from, or
        of another kind."""
        self._was_given_out = True
        with DisableTorchFunctionSubclass():
            left = self.packed is not None and storage_of(tensor.value) != storage_of(self.packed)
            if left or _kind(tensor.value) != tensor.kind:
                return True
        tensor.exposures, self._on_disk = exposures, None
        return False

    def device_views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the block's parameters and buffers as views of `memory`.

        Buffers have a version counter apart from the memory's, which therefore counts what is written to parameters.
        """
        views = self.layout.views(memory)
        if self.has_state:
            apart = self.layout.views(memory.data)
            views = [other if t.is_buffer else view for t, view, other in zip(self.tensors, views, apart)]
        return [like(t.value, view) for t, view in zip(self.tensors, views)]

    def copy_flags(self, views: list[torch.Tensor]) -> None:
        """Have parameters on the device require gradients where those on the host do.

        Operations look at that also where gradients are off: ``torch.matmul`` multiplies in another way, with other
        last bits.
        """
        with DisableTorchFunctionSubclass():
            for tensor, view in zip(self.tensors, views):
                if view.requires_grad != tensor.value.requires_grad:
                    view.requires_grad_(tensor.value.requires_grad)

    def fetch(self, memory: torch.Tensor) -> None:
        """Copy the block's tensors into `memory`: in one copy if they are packed."""
        if self.packed is not None:
            whole = memory if memory.numel() == self.layout.nbytes else memory[: self.layout.nbytes]
            whole.copy_(self.packed, non_blocking=True)
            return
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for tensor, view in zip(self.tensors, self.layout.views(memory)):
                view.copy_(tensor.value.detach(), non_blocking=True)

    def show(self, tensors: list[torch.Tensor]) -> None:
        """Make the model refer to `tensors`, one for each of the block's own."""
        for tensor, shown in zip(self.tensors, tensors):
            for registry, name in tensor.owners:  # as `HostTensor.show`; this is hot
                registry[name] = shown
            if tensor.second_places:
                for place in tensor.second_places:
                    place.show(shown)

    def keep_state(self, views: list[torch.Tensor], written: bool) -> bool:
        """Copy buffers, and parameters that a forward has written or replaced, to the host.

        Args:
            views: What the model referred to when the forward began.
            written: Whether it has written into parameters; if not, it may still have replaced some.

        Returns:
            Whether it has written into parameters or replaced some.

        Raises:
            DispatchError: A tensor was removed, or replaced by one of another shape or dtype.
        """
        was_cast = False
        for tensor, view in zip(self.tensors, views):
            registry, key = tensor.owners[0]
            current = registry.get(key)
            if current is not view:
                is_cast = current is not None and is_cast_in_forward(current)
                was_cast = was_cast or is_cast
                written = written or not (is_cast or tensor.is_buffer)
        if not (written or was_cast or self.has_state):
            return False
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for index, tensor in enumerate(self.tensors):
                registry, key = tensor.owners[0]
                current = registry.get(key)
                if current is not None and is_cast_in_forward(current):
                    if was_written_since_cast(current, tensor.value if tensor.is_buffer else None):
                        raise DispatchError(
                            f"{key!r} of {self.name!r} is cast in the forward and written then, which is not supported "
                            "for streamed tensors: cast it before the model is dispatched"
                            + (", or dispatch with offload_buffers=False" if tensor.is_buffer else "")
                        )
                    continue  # the next forward casts the host's again
                if not (written or tensor.is_buffer):
                    continue
                if current is None or (current.shape, current.dtype) != (tensor.value.shape, tensor.device_dtype):
                    what = "dispatch the model with offload_buffers=False" if tensor.is_buffer else "map it to a device"
                    raise DispatchError(
                        f"{key!r} of {self.name!r} was removed or changed its shape or dtype in the forward, which is "
                        f"not supported for streamed tensors: {what}"
                    )
                # An unwritten parameter must not be rounded to the dtype that it has on the device.
                value = tensor.value
                if tensor.is_buffer or not torch.equal(value.detach().to(current.dtype), current.detach().to(HOST)):
                    if self.earlier and not tensor.is_buffer:
                        began = value.detach().clone()
                        for asked in list(self.earlier.values()):  # forwards of other threads began with it, too
                            asked.setdefault(index, began)
                    value.copy_(current)
        return written

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Within this context only the calling thread recomputes the block for its gradients."""
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
    """Return a tensor's version counter; 0 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def content_version(tensor: torch.Tensor) -> int:
    """Return a number that increases whenever a host tensor may have been written to."""
    return version_of(tensor) + int(getattr(tensor, EXPOSURES, 0))


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
