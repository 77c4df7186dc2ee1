"""Storage and execution device of every tensor of a model, by a device map. Nothing is moved here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from ...devices import DISK, HOST, DeviceLike, is_accelerator, normalize_device
from ...errors import DeviceMapError
from ...profile.model.tensors import owner_of
from ..weights.block import Registry

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PlacedTensor:
    """One parameter or buffer at one place of the model, with its storage and execution device.

    The host computes calls of its module with fewer tokens than `computed_below`.
    """

    name: str
    registry: Registry
    key: str
    tensor: torch.Tensor
    storage_device: str
    execution_device: str
    is_buffer: bool
    computed_below: int = 0

    @property
    def offloaded(self) -> bool:
        """Whether the tensor is stored on the host or on disk."""
        return self.storage_device in (HOST, DISK)

    @property
    def place(self) -> tuple[str, str]:
        """Storage and execution device, the same for all tensors of a dispatch unit; RAM and disk count as one."""
        return HOST if self.offloaded else self.storage_device, self.execution_device


class DeviceMapLookup:
    """Looks up the devices of modules and tensors in a device map with canonical device names.

    Args:
        device_map: Device by module name; ``""`` is the whole model. The longest matching name decides.
        main_device: Execution device of offloaded modules; None: the accelerator with the lowest index in the map, or
            the host if there is none.
        execution: Offloaded modules, by name, that run elsewhere: on the host, or on another accelerator.
        computed_below: Tokens by module name, for streamed modules: the host computes calls with fewer.
    """

    def __init__(
        self,
        device_map: Mapping[str, DeviceLike],
        main_device: DeviceLike | None = None,
        execution: Mapping[str, DeviceLike] | None = None,
        computed_below: Mapping[str, int] | None = None,
    ) -> None:
        self.devices = {name: normalize_device(device) for name, device in device_map.items()}
        self.main_device = self._main(main_device)
        self.execution = {name: normalize_device(device) for name, device in (execution or {}).items()}
        self._computed_below = dict(computed_below or {})

    def storage_device(self, name: str) -> str:
        """Return the storage device of the module or tensor `name`.

        Raises:
            DeviceMapError: No entry of the map covers it.
        """
        found = _nearest(name, self.devices)
        if found is not None:
            return found
        raise DeviceMapError(
            f"the device map has no entry for {name!r}; add one for it, for a module around it, or for '' (the rest)"
        )

    def execution_device(self, name: str) -> str:
        """Return the execution device of the module or tensor `name`."""
        return self._place(name)[1]

    def computed_below(self, name: str) -> int:
        """Return the number of tokens below which the host computes a call of the streamed module `name`; 0: never."""
        return self._place(name)[2]

    def tensors(self, model: nn.Module) -> Iterator[PlacedTensor]:
        """Yield every tensor of `model`; a tied one once per name."""
        for prefix, module in model.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for registry, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for key, tensor in registry.items():
                    if tensor is not None:
                        name = dot + key
                        storage, execution, below = self._place(name)
                        yield PlacedTensor(name, registry, key, tensor, storage, execution, is_buffer, below)

    def _place(self, name: str) -> tuple[str, str, int]:
        """Return storage device, execution device, and the tokens below which the host computes a call."""
        storage = self.storage_device(name)
        if storage not in (HOST, DISK):
            return storage, storage, 0
        execution = _nearest(name, self.execution) or self.main_device
        below = _nearest(name, self._computed_below) if is_accelerator(execution) else None
        return storage, execution, below or 0

    def _main(self, given: DeviceLike | None) -> str:
        if given is not None:
            return HOST if normalize_device(given) == DISK else normalize_device(given)
        accelerators = [device for device in self.devices.values() if is_accelerator(device)]
        return min(accelerators, key=_number, default=HOST)


def _nearest(name: str, found: Mapping[str, T]) -> T | None:
    """Return the value of the longest key in `found` that is `name` or a module around it; None without any."""
    owner = owner_of(name, found) if found else None
    return None if owner is None else found[owner]


def _number(device: str) -> tuple[int, str]:
    kind, _, index = device.partition(":")
    return int(index or 0), kind
