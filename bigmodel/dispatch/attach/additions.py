"""Modules added to a dispatched model, such as adapters: the model's next call finds them.

They are part of no block, so nothing brings them to the accelerator. Parameters that lie on the host become offloaded
tensors (`outside_use`): each operation with a tensor of the accelerator uses a copy. Blocks learn which of them are in
their modules, so that gradients reach them. Buffers move to the device where their module runs, as those of offloaded
modules do. `prepare_training` makes all of these part of their blocks, which is faster.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ...devices import HOST
from ..weights.block import Block, HostTensor, Registry
from ..weights.outside_use import mark_offloaded
from ..weights.parameters import moved_like
from .attached_forward import AttachedForward, Parts, parts_of

_BlockOf = tuple["weakref.ref[nn.Module]", torch.device, Block, list[HostTensor]]
"""A module, the device that its block is streamed to, the block, and what the block fetched separately from the
beginning."""


class Additions:
    """Finds what is added to one dispatched model.

    Args:
        model: The model, dispatched just now. It and its modules are referenced weakly, to avoid reference cycles.
        attachments: Its attachments by module name.
        main_device: Where modules run that are in no block.
    """

    def __init__(self, model: nn.Module, attachments: Mapping[str, AttachedForward], main_device: torch.device) -> None:
        self._model = weakref.ref(model)
        self._main = main_device
        self._known = weakref.WeakKeyDictionary(
            {part: frozenset((*part._parameters, *part._buffers)) for part in model.modules()}
        )
        self._blocks: list[_BlockOf] = [
            (weakref.ref(attachment.module), streamer.device, block, block.nested)
            for attachment in attachments.values()
            for streamer, block in attachment.blocks
            if not block.encloses
        ]
        self._lock = threading.Lock()

    def find(self, parts: Parts) -> None:
        """Look for what was added since `parts`, those of the model, were found."""
        model = self._model()
        assert model is not None
        with self._lock:
            found = parts_of(model)
            for reference, device, block, fetched_separately in self._blocks:
                module = reference()
                if module is not None:
                    block.take_separately([*fetched_separately, *self._ready(module, device)])
            self._ready(model, self._main)
            parts.found = found  # the last: until then another thread waits here, too

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
