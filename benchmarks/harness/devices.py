"""Names of the devices that benchmarks run on."""

from __future__ import annotations


def first_device(device: str) -> str:
    """Return the first device of the kind that ``--device`` names: ``"cuda:0"`` for ``"cuda"``."""
    return f"{device}:0" if device in ("cuda", "virtual") else device


def is_virtual(device: str) -> bool:
    """Whether `device` is a virtual accelerator."""
    return device.partition(":")[0] == "virtual"
