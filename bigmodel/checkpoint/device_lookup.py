"""Device of a tensor: that of the longest key of a device map that is a prefix of the tensor's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..devices import DeviceLike, normalize_device, torch_device
from ..errors import DeviceMapError
from ..profile.model.tensors import owner_of


class DeviceLookup:
    """Looks up the device of a tensor in a device map.

    Args:
        device_map: module or tensor name -> device; ``""`` stands for the whole model.

    Raises:
        DeviceError: a value of the map is not a device.
    """

    def __init__(self, device_map: Mapping[str, DeviceLike]) -> None:
        self._devices = {name: normalize_device(device) for name, device in device_map.items()}

    def find(self, name: str) -> str | None:
        """Return the canonical device of the tensor `name`, ``"disk"`` included; None if the map does not cover it."""
        owner = owner_of(name, self._devices)
        return None if owner is None else self._devices[owner]

    def torch_device(self, name: str) -> torch.device:
        """Return the torch device of the tensor `name`; the CPU for a tensor on disk."""
        found = self.find(name)
        assert found is not None, "the map has been checked"
        return torch_device(found)

    def check(self, names: Iterable[str]) -> None:
        """Check that the map gives each of the tensors `names` a device.

        Raises:
            DeviceMapError: it does not; the message names the first such tensor.
        """
        missing = [name for name in names if self.find(name) is None]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DeviceMapError(
                f"device_map gives no device for {missing[0]}{more}; name its module, or add '' for all the rest"
            )
