"""Alignment: which attachments move inputs to another device, and outputs to the device that uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch
from torch import nn

from ...devices import HOST, is_accelerator, torch_device
from ...plan import Plan
from ...profile import find_no_split_classes
from ...profile.model.units import combining_module, is_lookup
from ..placement.dispatch_units import DispatchUnit, NameTree
from ..placement.lent import lent_tensors
from ..placement.options import Options
from ..placement.tensors import DeviceMapLookup, PlacedTensor
from .dispatched import Dispatched
from .outside_calls import attach_methods, attach_parts
from .untied import UntiedWeights


class Aligner:
    """Decides which modules of one model get an attachment that moves inputs or outputs.

    Args:
        modules: The model's modules by name, the model itself under ``""``.
        placed: Its tensors by name.
        placement: Storage and execution devices by the device map.
        units: Its dispatch units.
        plan: Its plan, which names the parts whose outputs are moved to the main device.
        options: Options of the dispatch.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        placed: Mapping[str, PlacedTensor],
        placement: DeviceMapLookup,
        units: Sequence[DispatchUnit],
        plan: Plan,
        options: Options,
    ) -> None:
        self.modules = modules
        self.placed = placed
        self.placement = placement
        self.units = units
        self.options = options
        self.main = torch_device(placement.main_device)
        self._falls_back = plan.main_device == HOST and any(map(is_accelerator, plan.devices))
        self._names = NameTree(placed)
        self._returns = {part.name: part.returns for part in plan.parts}
        self._whole = set(options.no_split_module_classes or find_no_split_classes(modules[""]))

    def align(self, result: Dispatched) -> None:
        """Attach to modules whose inputs may come from another device."""
        devices = {device for placed in self.placed.values() for device in _devices_of(placed)}
        several = len(devices | {self.placement.main_device} if is_accelerator(self.main) else devices) > 1
        if several:
            self._align_units(result)
        offloads = is_accelerator(self.main) and any(placed.offloaded for placed in self.placed.values())
        asked = self.options.force_hooks or self._comes_to_host()
        if several or offloads or result.attachments or asked:
            root = result.forward_of("", self.modules[""])
            root.device = root.device or self.main
            root.returns_to_input = True
        if result.attachments and not several:
            self._align_skeleton(result)
        for forward in result.attachments.values():
            skip = self.options.skip_keys
            forward.skip_keys = {skip} if isinstance(skip, str) else set(skip or ())
        attach_methods(result, self.modules, self.units)
        if several:
            result.untied = UntiedWeights(result.ties, self.placed)
            result.lent = lent_tensors(self.modules, self.units)
            attach_parts(result, self.units, self.modules, self.placed)

    def _comes_to_host(self) -> bool:
        """Whether the plan leaves the whole model to the host, as nothing of it fits an accelerator: callers could not
        know, and give it what is there."""
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module in self.modules.values())
        return self._falls_back and not scripted

    def _align_units(self, result: Dispatched) -> None:
        """Move inputs to each unit, and those outputs to the main device that the plan names, with what the unit puts
        into containers that it is given. For a map without a dry
        run, outputs are moved to the enclosing module if that may compute with them; those of lookups, and of what is
        called together with them, to the main device."""
        for name, names, encloses in self.units:
            if encloses or not names:
                continue
            forward = result.forward_of(name, self.modules[name])
            if forward.device is None:
                forward.device = torch_device(self.placed[names[0]].execution_device)
            returns = self._returns.get(name)
            if returns is None:
                self._return_to_enclosing(name, result)
                returns = forward.output_device is None and self._joins_lookup(name)
            if returns:
                forward.output_device = self.main
            if returns or self._returns.get(name) is None:
                forward.written_device = self.main

    def _joins_lookup(self, name: str) -> bool:
        """Whether a module is a lookup, or comes beside one before the blocks, where outputs are added to each other:
        those of a convolution to embeddings of positions, for example."""
        if is_lookup(self.modules[name]):
            return True
        above, _, own = name.rpartition(".")
        siblings = self.modules[above].named_children()
        first = dict(takewhile(lambda each: not self._holds_blocks(each[1]), siblings))
        return own in first and any(map(is_lookup, first.values()))

    def _holds_blocks(self, module: nn.Module) -> bool:
        return isinstance(module, nn.ModuleList) or type(module).__name__ in self._whole

    def _return_to_enclosing(self, name: str, result: Dispatched) -> None:
        """Move the outputs of a module to the module around it that computes with them, and so on outwards."""
        enclosing = combining_module(self.modules, name, self._whole)
        if enclosing is None:
            return
        device = torch_device(self._device_of_enclosing(enclosing))
        result.forward_of(name, self.modules[name]).output_device = device
        if enclosing or self._names.own(enclosing):
            around = result.forward_of(enclosing, self.modules[enclosing])
            around.device = device
            if around.output_device is None:
                self._return_to_enclosing(enclosing, result)

    def _device_of_enclosing(self, name: str) -> str:
        """Return the execution device of the split module `name`: of its own tensors, else of the first inside it; for
        the model itself, without tensors of its own, the main device, to which its inputs are moved."""
        own = self._names.own(name)
        if not (name or own):
            return self.placement.main_device
        return self.placed[(own or self._names.inside(name))[0]].execution_device

    def _align_skeleton(self, result: Dispatched) -> None:
        """Attach to the modules that enclose streamed ones: an encoder may be called without its model."""
        for name in list(result.attachments):
            while name:
                name = name.rpartition(".")[0]
                module = self.modules[name]
                if type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList):
                    forward = result.forward_of(name, module)
                    forward.device = forward.device or self.main


def _devices_of(placed: PlacedTensor) -> list[str]:
    """Return the devices on which a tensor may be used in compute."""
    return [placed.execution_device, HOST] if placed.computed_below else [placed.execution_device]
