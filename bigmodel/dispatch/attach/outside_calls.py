"""Calls from outside: of parts of a unit that runs elsewhere, and of methods beside ``forward``.

Inputs are brought to a unit when its forward is called. Some models call parts of a unit themselves, and some have
other methods that start a computation, as ``decode`` does. Such a part or method brings its inputs too, and returns
what it computes to where they were.

Nearly all parts of units are called by their unit alone, and then have nothing to bring. Which ones others call shows
in the first forward of the model; after that the rest carry nothing any more. Some methods the model calls in its own
forward, as multimodal models call theirs for the features of an image: what these return stays where it is, and they
bring nothing either if their module has no tensors of its own. The units below it do.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from threading import Lock, local
from typing import Any

import torch
from torch import nn

from ...devices import torch_device
from ...profile.model.units import methods_of
from ..placement.dispatch_units import DispatchUnit
from ..placement.tensors import PlacedTensor
from ..streaming.gradients import Compute
from .attached_forward import AttachedForward
from .dispatched import Dispatched
from .mixed_devices import explained


def attach_methods(result: Dispatched, modules: Mapping[str, nn.Module], units: Sequence[DispatchUnit]) -> None:
    """Have methods beside ``forward``, of the model and of modules whose inputs are brought, bring theirs.

    Args:
        result: Receives the attachments.
        modules: The model's modules by name.
        units: What the model is cut into.
    """
    running = _Running()
    entries = 0
    whole = {name for name, _, encloses in units if not encloses}
    for name, forward in list(result.attachments.items()):
        device = forward.device
        if device is None or forward.weights_on_host or forward.host_or_device is not None:
            continue
        module = modules[name]
        at_entry = name not in whole
        for method in methods_of(module):
            _bring(result, module, device, forward.skip_keys, method, running if at_entry else None)
            entries += at_entry
    root = result.attachments.get("")
    if root is not None and entries:
        root.compute = functools.partial(running.run, root.compute or root.plain)


def attach_parts(
    result: Dispatched,
    units: Sequence[DispatchUnit],
    modules: Mapping[str, nn.Module],
    placed: Mapping[str, PlacedTensor],
) -> None:
    """Have the parts of units that hold tensors bring their inputs, until it is known which need not.

    Args:
        result: Receives the attachments; the model's own is among them.
        units: What the model is cut into.
        modules: Its modules by name.
        placed: Its tensors by name.
    """
    known = {id(modules[name]) for name in result.attachments}
    for name, tensors, encloses in units:
        forward = result.attachments.get(name)
        if encloses or forward is None or forward.blocks or forward.host_or_device is not None:
            continue
        for part in modules[name].modules():
            if id(part) not in known and (part._parameters or part._buffers):
                device = torch_device(placed[tensors[0]].execution_device)
                _bring(result, part, device, forward.skip_keys, "forward")
                known.add(id(part))
    root = result.attachments[""]
    root.compute = explained(modules[""], root.compute or root.plain)
    root.compute = _FirstForward(root, result)


def _bring(
    result: Dispatched,
    module: nn.Module,
    device: torch.device,
    skip_keys: Collection[str],
    method: str,
    running: _Running | None = None,
) -> None:
    if running is None:
        attached = AttachedForward(module, device, skip_keys, method)
    else:
        attached = _EntryPoint(module, device, skip_keys, method, running)
    attached.returns_to_input = True
    result.outside.append(attached)


class _Running(local):
    """Whether this thread runs a call of the model, through its forward or another method."""

    inside = False

    def run(self, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self.inside = self.inside, True
        try:
            return compute(args, kwargs)
        finally:
            self.inside = before


class _EntryPoint(AttachedForward):
    """A method of the model or of a module around units: what it returns comes back unless the model itself calls it.

    Then it brings its inputs only if the module has tensors of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        skip_keys: Collection[str],
        method: str,
        running: _Running,
    ) -> None:
        super().__init__(module, device, skip_keys, method)
        self._running = running
        self._has_tensors = bool(module._parameters or module._buffers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._running.inside:
            if not self._has_tensors or self.device is None:
                return self._run(args, kwargs)
            return self._run_on(self.device, self._run, args, kwargs)
        return self._running.run(self._enter, args, kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().__call__(*args, **kwargs)


class _FirstForward:
    """Computes the model's first forward, and then detaches from parts what nobody outside their units needed."""

    def __init__(self, root: AttachedForward, result: Dispatched) -> None:
        self._root = root
        self._compute = root.compute or root.plain
        self._given = root.compute
        self._result = result
        self._lock = Lock()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._compute(args, kwargs)
        with self._lock:  # threads may share the first forward
            self._root.compute = self._given
            outside = self._result.outside
            for attached in [each for each in outside if each.method == "forward" and not each.moved_inputs]:
                attached.detach()
                outside.remove(attached)
        return output
