"""Names of devices, and which accelerators are present.

Inside the project a device has one canonical name: ``"cuda:0"``, ``"virtual:1"``, ``"mps"``, ``"cpu"`` or ``"disk"``.
Users may also pass an int (the n-th accelerator), ``"cuda"`` or a ``torch.device``.
"""

from __future__ import annotations

import os
from typing import TypeAlias

import torch

from ..errors import DeviceError
from . import virtual

DeviceLike: TypeAlias = "int | str | torch.device"

HOST = "cpu"
DISK = "disk"

# By default PyTorch asks the driver whether there is CUDA, after which no forked process can use it. NVML tells, too.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def accelerator_type() -> str | None:
    """Return the device type that an int refers to: ``"virtual"`` if enabled, else the machine's; None without any."""
    for kind in (virtual.TYPE, "cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            return kind
    return None


def accelerators() -> list[str]:
    """Return the canonical names of the accelerators present, in order."""
    kind = accelerator_type()
    if kind is not None:
        return [f"{kind}:{index}" for index in range(torch.get_device_module(kind).device_count())]
    return ["mps"] if torch.backends.mps.is_available() else []


LAST_INDEX = 127
"""The largest index of a `torch.device`, which keeps eight bits: of ``"cuda:300"`` it makes ``cuda:44``."""


def normalize_device(device: DeviceLike) -> str:
    """Return the canonical name of `device`.

    Args:
        device: An int (the n-th accelerator), text such as ``"cuda"``, ``"cuda:1"``, ``"cpu"``, ``"disk"``, or a
            ``torch.device``; ``"cuda"`` is the current one, as for PyTorch. Whether an accelerator of that number is
            present is not checked.

    Raises:
        DeviceError: The text is not a device name, an int is given and the machine has no accelerator, or `device` has
            another type.
    """
    if isinstance(device, bool):
        raise DeviceError(f"{device!r} is not a device; give an accelerator's number, 'cpu' or 'disk'")
    if isinstance(device, int):
        return _nth_accelerator(device)
    if isinstance(device, str):
        text = device.strip()
        if text.isdecimal():
            return _nth_accelerator(int(text))
        if text == DISK:
            return DISK
        index = text.partition(":")[2]
        if index.isdecimal() and int(index) > LAST_INDEX:
            raise DeviceError(f"{text!r} is not a device: {int(index)} is past the last number of one, {LAST_INDEX}")
        try:
            device = torch.device(text)
        except RuntimeError:
            raise DeviceError(f"{text!r} is not a device; write 0, 'cuda:0', 'mps', 'cpu' or 'disk'") from None
    if not isinstance(device, torch.device):
        raise DeviceError(f"a {type(device).__name__} is not a device; give an accelerator's number, 'cpu' or 'disk'")
    if device.type in (HOST, "mps", "meta"):
        return device.type
    return f"{device.type}:{device.index if device.index is not None else current_index(device.type)}"


def current_index(kind: str) -> int:
    """Return the index of the accelerator that `kind` without a number means: the calling thread's current one.

    A device type that has not been used yet is not initialised for it: its current device is its first.
    """
    if kind not in ("cuda", "xpu"):
        return 0
    module = torch.get_device_module(kind)
    return int(module.current_device()) if module.is_initialized() else 0


def device_key(device: DeviceLike) -> int | str:
    """Return `device` as a key of device maps: an int for an accelerator of the machine's type, else its name."""
    name = normalize_device(device)
    kind, _, index = name.partition(":")
    return int(index) if index and kind == accelerator_type() else name


def torch_device(device: DeviceLike) -> torch.device:
    """Return the ``torch.device`` of tensors on `device`; for ``"disk"``, the host."""
    name = normalize_device(device)
    return torch.device(HOST if name == DISK else name)


def is_accelerator(device: DeviceLike) -> bool:
    """Whether `device` is an accelerator: any device but the host, the disk and meta."""
    return normalize_device(device) not in (HOST, DISK, "meta")


def check_present(device: DeviceLike) -> None:
    """Check that this machine has `device`.

    Raises:
        DeviceError: It does not; the message names the device and those that are present.
    """
    name = normalize_device(device)
    if not _is_present(name):
        present = ", ".join(repr(each) for each in (*accelerators(), HOST, DISK))
        raise DeviceError(f"device {name!r} is not present; this machine has {present}")


def _is_present(name: str) -> bool:
    kind, _, index = name.partition(":")
    if not is_accelerator(name):
        return name in (HOST, DISK)
    if kind == "mps":
        return torch.backends.mps.is_available()
    try:
        return int(index) < int(torch.get_device_module(kind).device_count())
    except RuntimeError:  # this build of PyTorch does not support the device type
        return False


def _nth_accelerator(index: int) -> str:
    kind = accelerator_type()
    if index < 0:
        raise DeviceError(f"device {index} is negative; accelerators count from 0")
    if kind is None:
        if index == 0 and torch.backends.mps.is_available():
            return "mps"
        raise DeviceError(
            f"device {index} means accelerator number {index}, but this machine has none; use 'cpu' or 'disk'"
        )
    return f"{kind}:{index}"
