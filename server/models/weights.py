"""Where the bytes of a model's weights are."""

from __future__ import annotations

import torch

from bigmodel.checkpoint.mapping import mapped_region
from bigmodel.devices import normalize_device


def weight_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of parameters and buffers by device, "disk" for views of a checkpoint file; tied ones once."""
    seen: set[tuple[str, int]] = set()
    total: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        # Wrapper tensors of accelerators written in Python have no address of their own.
        addressed = tensor.device.type in ("cpu", "cuda")
        key = (str(tensor.device), tensor.data_ptr() if addressed else id(tensor))
        if key in seen or not tensor.nbytes:
            continue
        seen.add(key)
        name = _holder(tensor)
        total[name] = total.get(name, 0) + tensor.nbytes
    return total


def _holder(tensor: torch.Tensor) -> str:
    """The device that holds a tensor's bytes; "disk" for a view of a checkpoint file."""
    if mapped_region(tensor) is not None:
        return "disk"
    return normalize_device(tensor.device)
