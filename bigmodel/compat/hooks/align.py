"""A hook that brings a module's inputs and weights to one device while it runs (`AlignDevicesHook`).

Weights that it offloads stay real: parameters on the host, or views of a mapped file. On another device there are
copies of them while the module runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from ...devices import HOST, DeviceLike, torch_device
from ...devices.nested import send_to_device
from ...dispatch.weights.parameters import like, moved_like, refresh_second_places
from ...train.nested import find_device
from .model_hook import ModelHook

TiedCopies = dict[int, dict[torch.device, torch.Tensor]]
"""For each address of a tied weight, its copy on each device."""


class AlignDevicesHook(ModelHook):
    """Brings inputs, and with `offload` also weights, to the execution device for each forward.

    Args:
        execution_device: Where the module runs; None leaves everything where it is.
        offload: Keep the weights on the host, or in `weights_map`, between forwards.
        io_same_device: Return the output to the device that the inputs came from.
        weights_map: The values of offloaded weights by name; None takes the module's own.
        offload_buffers: Offload the buffers, too.
        place_submodules: Treat the weights of all modules in the module, too.
        skip_keys: Keyword arguments that are not moved.
        tied_params_map: Copies of tied weights, which several hooks share so that each exists once per device.

    Attributes:
        original_devices: Devices of the weights before they were offloaded.
        input_device: Where the inputs of the last forward came from, with `io_same_device`.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Collection[str] | None = None,
        tied_params_map: TiedCopies | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._on_device: dict[str, _OnDevice] = {}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            self._place(module, [name for name, _ in self._tensors(module)])
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self._bring(module)
        if self.execution_device is None:
            return args, kwargs
        device = torch_device(self.execution_device)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            self._return(module)
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.offload:
            self._return(module)
            for name, device in self.original_devices.items():
                registry, key = _place_of(module, name)
                if device.type != "meta" and registry[key].device != device:
                    registry[key] = moved_like(registry[key], device)
            refresh_second_places(module)
        return module

    def _tensors(self, module: nn.Module, buffers: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        recurse = self.place_submodules
        yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
        if buffers:
            yield from module.named_buffers(recurse=recurse, remove_duplicate=False)

    def _offloaded(self, module: nn.Module) -> list[str]:
        """Return the names of what is offloaded: parameters, and persistent buffers with `offload_buffers`."""
        lasting = module.state_dict(keep_vars=True) if self.offload_buffers else {}
        named = self._tensors(module, buffers=self.offload_buffers)
        return [name for name, tensor in named if isinstance(tensor, nn.Parameter) or name in lasting]

    def _offload(self, module: nn.Module) -> None:
        self.original_devices = {name: tensor.device for name, tensor in self._tensors(module)}
        offloaded = self._offloaded(module)
        given = self.weights_map
        kept: dict[str, torch.Tensor] = {}
        for name in offloaded:
            registry, key = _place_of(module, name)
            registry[key] = kept[name] = _stored(registry[key], None if given is None else given[name])
        refresh_second_places(module)
        if given is None:
            self.weights_map = kept
        if self.execution_device is not None:
            rest = {name for name, _ in self._tensors(module)} - set(offloaded)
            self._place(module, sorted(rest))

    def _place(self, module: nn.Module, names: list[str]) -> None:
        """Move the tensors `names` to the execution device to stay."""
        assert self.execution_device is not None
        device = torch_device(self.execution_device)
        moved: dict[int, torch.Tensor] = {}
        for name in names:
            registry, key = _place_of(module, name)
            tensor = registry[key]
            if tensor.device == device or tensor.is_meta:
                continue
            copies = (self.tied_params_map or {}).get(tensor.data_ptr(), {})
            copy = moved.get(id(tensor), copies.get(device))
            if copy is None:
                copy = moved_like(tensor, device)
                if self.tied_params_map is not None and tensor.data_ptr() in self.tied_params_map:
                    self.tied_params_map[tensor.data_ptr()][device] = copy
            moved[id(tensor)] = registry[key] = copy
        refresh_second_places(module)

    def _bring(self, module: nn.Module) -> None:
        """Put copies of the offloaded weights on the execution device into the module."""
        if self.execution_device is None:
            return
        device = torch_device(self.execution_device)
        copies: dict[int, torch.Tensor] = {}
        for name in self._offloaded(module):
            registry, key = _place_of(module, name)
            stored = registry[key]
            if stored.device == device or name in self._on_device:
                continue
            if id(stored) not in copies:
                copies[id(stored)] = _copy_on(stored, device)
            copy = registry[key] = copies[id(stored)]
            self._on_device[name] = _OnDevice(stored, copy, copy._version, self.weights_map)
        refresh_second_places(module)

    def _return(self, module: nn.Module) -> None:
        """Put the offloaded weights back into the module in place of their copies.

        What the forward has written into a copy, and what others have put into `weights_map` meanwhile, stays."""
        for name, brought in self._on_device.items():
            registry, key = _place_of(module, name)
            stored, present = brought.stored, registry[key]
            if self.weights_map is not brought.weights_map and self.weights_map is not None:
                stored = _stored(stored, self.weights_map.get(name))
            elif present is not brought.copy or present._version != brought.version or not _is_parameter(stored):
                with torch.no_grad():
                    stored.copy_(present)
            registry[key] = stored
        self._on_device.clear()
        refresh_second_places(module)


class _OnDevice:
    """An offloaded weight while there is a copy of it on the execution device."""

    __slots__ = ("copy", "stored", "version", "weights_map")

    def __init__(
        self, stored: torch.Tensor, copy: torch.Tensor, version: int, weights_map: Mapping[str, torch.Tensor] | None
    ) -> None:
        self.stored = stored
        self.copy = copy
        self.version = version
        self.weights_map = weights_map


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether writing to a tensor is counted; kernels that write statistics into buffers do not count it."""
    return isinstance(tensor, nn.Parameter)


def _place_of(module: nn.Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    """Return the registry that holds the parameter or buffer `name` of `module`, and its key there."""
    owner_name, _, key = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    return (owner._parameters if key in owner._parameters else owner._buffers), key


def _stored(tensor: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that a module keeps while `tensor` is offloaded: of its class and dtype, with `value`."""
    if value is None:
        return tensor if tensor.device.type == HOST else moved_like(tensor, torch_device(HOST))
    value = value.detach()
    same = tensor.data_ptr() == value.data_ptr() and tensor.device == value.device and tensor.dtype == value.dtype
    return tensor if same and not tensor.is_meta else like(tensor, value.to(HOST, tensor.dtype))


def _copy_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a weight on `device`; where gradients are recorded, one through which they reach the weight."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return tensor.to(device)
    return moved_like(tensor, device)
