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
from .attached_forward import AttachedForward

_BlockOf = tuple["weakref.ref[nn.Module]", torch.device, Block, list[HostTensor]]
"""A module, the device that its block is streamed to, the block, and what the block fetched separately from the
beginning."""

_Members = tuple[tuple[object, ...], ...]
"""The names in a module, each with what it refers to."""


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
        self._structure = list(_structure(model))
        self._lock = threading.Lock()

    def find(self) -> None:
        """Look for what was added since the last call, if any module was added or replaced."""
        for reference, members in self._structure:
            module = reference()
            if module is None or _members(module) != members:
                break
        else:
            return
        model = self._model()
        assert model is not None
        with self._lock:
            structure = list(_structure(model))
            for reference, device, block, fetched_separately in self._blocks:
                module = reference()
                if module is not None:
                    block.take_separately([*fetched_separately, *self._ready(module, device)])
            self._ready(model, self._main)
            self._structure = structure  # the last: until then another thread waits here, too

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


def _structure(model: nn.Module) -> Iterator[tuple[weakref.ref[nn.Module], _Members]]:
    """Yield the modules of `model` that change when something is added to it, each with what it holds now.

    A layer without modules in it, such as a linear one, is replaced and not extended, which its parent's shows.
    """
    for module in model.modules():
        if module._modules or not module._parameters or isinstance(module, nn.ParameterDict):
            yield weakref.ref(module), _members(module)


def _members(module: nn.Module) -> _Members:
    """Return the names in a module, each with a weak reference to the module of that name."""
    keys = module._keys if isinstance(module, nn.ParameterDict) else ()
    modules = ((name, None if child is None else weakref.ref(child)) for name, child in module._modules.items())
    return (*modules, *((key,) for key in keys))
