"""Description of the machine that figures were measured on: processor, memory, accelerators, versions."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "diffusers", "safetensors", "numpy", "bigmodel")


def describe_machine() -> dict[str, Any]:
    """Return processor, usable cores, bytes of memory, accelerators, system and versions as plain data."""
    from bigmodel.devices.cgroup import usable_cores
    from bigmodel.devices.memory import physical_bytes
    from bigmodel.profile.machine.probe import processor_name

    return {
        "cpu": processor_name(),
        "cores": usable_cores(),
        "memory": physical_bytes(),
        "accelerators": _accelerators(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": _threads(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def device_slug(device: str) -> str:
    """Return a name for results of `device` on this machine, fit for a file: ``"cpu-amd-epyc"``, ``"nvidia-h100"``.

    Args:
        device: ``"cpu"``, ``"virtual"`` or an accelerator's type.
    """
    from bigmodel.profile.machine.probe import processor_name

    kind = device.partition(":")[0]
    found = _accelerators()
    name = found[0] if kind not in ("cpu", "virtual") and found else f"{kind} {processor_name()}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _accelerators() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
