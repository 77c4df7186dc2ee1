"""Hooks of models that run one after another: a whole model goes to the device when it is called (`CpuOffload`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...devices import HOST, DeviceLike, torch_device
from ...devices.nested import send_to_device
from ...train.memory import clear_device_cache
from ...train.state.partial import PartialState
from .model_hook import ModelHook, add_hook_to_module, remove_hook_from_module


class CpuOffload(ModelHook):
    """Keeps a model on the host until it is called, then moves all of it to the device and leaves it there.

    Args:
        execution_device: Where the model runs; None: the first accelerator, else the host.
        prev_module_hook: The hook of the model that runs before this one; a call moves that model back to the host.
    """

    def __init__(
        self, execution_device: DeviceLike | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        device = PartialState().default_device if execution_device is None else execution_device
        self.execution_device = torch_device(device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(HOST)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        before = self.prev_module_hook
        if before is not None and _device(before.model) not in (None, torch_device(HOST)):
            before.offload()
            clear_device_cache()
        if _device(module) not in (None, self.execution_device):
            module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """Handle of a model of `cpu_offload_with_hook`: moves it back to the host on request.

    Args:
        model: The model.
        hook: Its hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the host."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Add a `CpuOffload` hook to `model`, and return both; a second call replaces the first one's hook.

    Args:
        execution_device: Where the model runs; None: the first accelerator, else the host.
        prev_module_hook: The handle of the model that runs before this one.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _device(model: nn.Module) -> torch.device | None:
    """Return the device of a model's first tensor; None if it has none."""
    first = next(iter((*model.parameters(), *model.buffers())), None)
    return None if first is None else first.device
