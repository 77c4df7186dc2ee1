"""Measures what a device with a caching allocator takes beside tensors: libraries' workspace, the driver's context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...devices import nvml
from ...devices.caching import memory_now
from ...devices.memory import CachingMemory, caching_memory

WIDTH = 512
"""Rows and columns of the product that makes a library allocate its workspace: its result is a whole block."""


def measured_caching(device: torch.device) -> CachingMemory | None:
    """Return the bytes that `device` takes beside tensors; None if its allocator does not cache.

    A stream that has computed nothing has no workspace yet: the first product on it allocates one. The context is what
    the management library says of this process, as far as it can tell processes apart; otherwise the nominal figure.
    """
    nominal = caching_memory(device)
    if nominal is None:
        return None
    module: Any = torch.get_device_module(device.type)
    matrix = torch.ones(WIDTH, WIDTH, device=device)
    module.synchronize(device)
    before = memory_now(device).allocated
    with torch.inference_mode(), module.stream(module.Stream(device=device)):
        product = matrix @ matrix
    module.synchronize(device)
    workspace = memory_now(device).allocated - before - product.nbytes
    del product, matrix
    if device.type != "cuda":
        return replace(nominal, workspace=workspace)
    torch._C._cuda_clearCublasWorkspaces()
    used = nvml.used_by_this_process(device.index)
    context = nominal.context if used is None else max(used - memory_now(device).reserved, 0)
    return CachingMemory(workspace, context)
