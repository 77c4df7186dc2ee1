"""Keep a whole model on the host or on disk and stream it to a device as it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..devices import DISK, HOST, DeviceLike, accelerators, torch_device
from ..devices.nested import send_to_device
from ..errors import DispatchError
from .dispatch import place_and_attach
from .placement.offload_files import fill_meta
from .placement.options import Options, PlanArguments
from .placement.resolve import ResolvedMap, resolve_given, whole_classes
from .weights.parameters import forget_second_places, moved_in_place, refresh_second_places


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
    offload_dtype: str | None = None,
) -> nn.Module:
    """Keep all of `model`'s weights in host memory and stream each block to `execution_device` as it runs.

    Args:
        model: Any module.
        execution_device: Execution device; None: the device of its first parameter.
        offload_buffers: Stream the buffers too; by default they stay on `execution_device`.
        state_dict: Weights for parameters that are on ``meta``.
        preload_module_classes: More classes whose weights are streamed as a whole.
        offload_dtype: As for `dispatch_model`.
    """
    fill_meta(model, state_dict)
    resolved, options = _whole_model_at(
        HOST, model, execution_device, offload_buffers, preload_module_classes, offload_dtype
    )
    return place_and_attach(model, resolved, options)


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
    offload_dtype: str | None = None,
) -> nn.Module:
    """Keep all of `model`'s weights on disk and stream each block to `execution_device` as it runs.

    Weights that view a memory-mapped checkpoint stay in it; others are first written to an unlinked file in
    `offload_dir`, which is deleted with the model.

    Args:
        model: Any module.
        offload_dir: Folder for weights that are in memory.
        execution_device: Execution device; None: the device of its first parameter.
        offload_buffers: Stream the buffers too; by default they stay on `execution_device`.
        preload_module_classes: More classes whose weights are streamed as a whole.
        offload_dtype: As for `dispatch_model`.
    """
    fill_meta(model, offload_dir=offload_dir)
    resolved, options = _whole_model_at(
        DISK, model, execution_device, offload_buffers, preload_module_classes, offload_dtype
    )
    return place_and_attach(model, resolved, options, offload_dir)


def _whole_model_at(
    storage: str,
    model: nn.Module,
    execution_device: DeviceLike | None,
    offload_buffers: bool,
    preload_module_classes: Collection[str] | None,
    offload_dtype: str | None,
) -> tuple[ResolvedMap, Options]:
    """Return the map that keeps a whole model on the host or on disk, and the options of its dispatch."""
    classes = whole_classes(model, None, preload_module_classes)
    arguments = PlanArguments.read(
        main_device=_execution_device(model, execution_device),
        no_split_module_classes=classes,
        offload_buffers=offload_buffers,
        offload_dtype=offload_dtype,
    )
    return resolve_given(model, {"": storage}, arguments), Options(no_split_module_classes=classes)


def _execution_device(model: nn.Module, given: DeviceLike | None) -> DeviceLike:
    if given is not None:
        return given
    first = next(iter(model.parameters()), None)
    return HOST if first is None or first.is_meta else first.device


class UserCpuOffloadHook:
    """Handle of a model of `cpu_offload_with_hook`: moves it back to the host on request."""

    def __init__(self, model: nn.Module, hook: WholeModelForward) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model's weights back to the host."""
        self.hook.offload()

    def remove(self) -> None:
        """Restore the model's own forward; its weights stay where they are."""
        self.hook.detach()


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep `model` on the host until it is called, then move all of it to the device and leave it there.

    For pipelines of several models that run one after another: a call moves the previous model back to the host.

    Args:
        model: Any module.
        execution_device: Execution device; None: the first accelerator, else the host.
        prev_module_hook: The hook of the model that runs before this one.

    Returns:
        The model and its hook, whose `offload` moves it back to the host.

    Raises:
        DispatchError: The model has such a hook already.
    """
    device = torch_device(execution_device if execution_device is not None else (accelerators() or [HOST])[0])
    hook = WholeModelForward(model, device, prev_module_hook)
    return model, UserCpuOffloadHook(model, hook)


class WholeModelForward:
    """Replaces a model's forward: moves the whole model to the device before each call."""

    def __init__(self, model: nn.Module, device: torch.device, previous: UserCpuOffloadHook | None) -> None:
        if isinstance(model.__dict__.get("forward"), WholeModelForward):
            raise DispatchError("this model already has an offload hook; call its remove() first")
        self.model = model
        self.device = device
        self.previous = previous
        self._own = model.__dict__.get("forward")
        self._host: dict[int, torch.Tensor] = {}
        self._move(torch_device(HOST))
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            self.previous.offload()
        self._move(self.device)
        args, kwargs = send_to_device((args, kwargs), self.device)
        if self._own is not None:
            return self._own(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def offload(self) -> None:
        """Move the weights back to the host."""
        self._move(torch_device(HOST))

    def detach(self) -> None:
        """Restore the model's own forward."""
        if self._own is not None:
            self.model.forward = self._own
        else:
            self.model.__dict__.pop("forward", None)

    def _move(self, device: torch.device) -> None:
        forget_second_places(self.model)
        moved: dict[int, torch.Tensor] = {}
        for module in self.model.modules():
            for registry in (module._parameters, module._buffers):
                for key, tensor in registry.items():
                    if tensor is not None and tensor.device != device:
                        if id(tensor) not in moved:
                            moved[id(tensor)] = moved_in_place(tensor, device)
                        registry[key] = moved[id(tensor)]  # type: ignore[assignment]
        refresh_second_places(self.model)
