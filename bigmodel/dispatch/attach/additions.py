"""Modules added to a dispatched model, such as adapters: the next call of the model, or of a part, finds them.

They are part of no block, so nothing brings them to the accelerator. Parameters that lie on the host become offloaded
tensors (`outside_use`): each operation with a tensor of the accelerator uses a copy. Blocks learn which of them are in
their modules, so that gradients reach them. Buffers move to the device where their module runs, as those of offloaded
modules do. `prepare_training` makes all of these part of their blocks, which is faster.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from ...devices import HOST
from ..weights.block import Block, HostTensor, Registry
from ..weights.outside_use import mark_offloaded
from ..weights.parameters import moved_like
from .attached_forward import AttachedForward

_BlockOf = tuple["weakref.ref[nn.Module]", torch.device, Block, list[HostTensor]]
"""A module, the device that its block is streamed to, the block, and what the block fetched separately from the
beginning."""


class Additions:
    """Finds what is added to one dispatched model.

    PyTorch tells of each module, parameter and buffer that any module registers. One of this model's sets `before` of
    the attachments, so that the next call looks for what is new; other calls pay nothing.

    Args:
        model: The model, dispatched just now. It and its modules are referenced weakly, to avoid reference cycles.
        attachments: Its attachments by module name.
        outside: Its other attachments.
        main_device: Where modules run that are in no block.
    """

    def __init__(
        self,
        model: nn.Module,
        attachments: Mapping[str, AttachedForward],
        outside: Sequence[AttachedForward],
        main_device: torch.device,
    ) -> None:
        self._model = weakref.ref(model)
        self._main = main_device
        self._starts = [weakref.ref(attachment) for attachment in (*attachments.values(), *outside)]
        self._known = weakref.WeakKeyDictionary(
            {part: frozenset((*part._parameters, *part._buffers)) for part in model.modules()}
        )
        self._parts = weakref.WeakSet(model.modules())
        self._blocks: list[_BlockOf] = [
            (weakref.ref(attachment.module), streamer.device, block, block.nested)
            for attachment in attachments.values()
            for streamer, block in attachment.blocks
            if not block.encloses
        ]
        self._pending = False
        self._lock = threading.RLock()
        told = partial(_tell, weakref.ref(self))
        self.stop = weakref.finalize(self, _remove, [register(told) for register in _REGISTRATIONS])
        """Stops listening to registrations, as the end of this object does."""
        self.stop.atexit = False

    def registered(self, module: nn.Module, name: str) -> None:
        """Have the next call look for additions, if `module` is one of the model's and `name` is new to it."""
        if module in self._parts and name not in module._parameters and name not in module._buffers:
            with self._lock:
                self._pending = True
                self._call_before(self.find)

    def find(self) -> None:
        """Look for what was added since the last call."""
        model = self._model()
        with self._lock:  # another thread waits here until all is found
            if not self._pending or model is None:
                return
            self._pending = False
            for reference, device, block, fetched_separately in self._blocks:
                module = reference()
                if module is not None:
                    block.take_separately([*fetched_separately, *self._ready(module, device)])
            self._ready(model, self._main)
            self._parts.update(model.modules())
            self._call_before(None)

    def _call_before(self, find: Callable[[], None] | None) -> None:
        for reference in self._starts:
            attachment = reference()
            if attachment is not None:
                attachment.before = find

    def _ready(self, module: nn.Module, device: torch.device) -> list[HostTensor]:
        """Make what was added to `module` usable on `device`; return the parameters that stay on the host."""
        parameters = {}
        with torch.inference_mode(False):
            for name, registry, key in self._added(module):
                tensor = registry[key]
                if isinstance(tensor, nn.Parameter):
                    mark_offloaded([tensor])
                    parameters[id(tensor)] = HostTensor(tensor, tensor.dtype, name=name)
                else:
                    registry[key] = moved_like(tensor, device)
        return list(parameters.values())

    def _added(self, module: nn.Module) -> Iterator[tuple[str, Registry, str]]:
        """Yield the name, registry and key of each tensor on the host that was added to `module`."""
        for prefix, part in module.named_modules():
            known = self._known.get(part, frozenset())
            for registry in (part._parameters, part._buffers):
                for key, tensor in registry.items():
                    if tensor is not None and key not in known and tensor.device.type == HOST:
                        yield f"{prefix}.{key}", registry, key


_REGISTRATIONS = (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
    register_module_buffer_registration_hook,
)


def _tell(additions: weakref.ref[Additions], module: nn.Module, name: str, _registered: object) -> None:
    found = additions()
    if found is not None:
        found.registered(module, name)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
