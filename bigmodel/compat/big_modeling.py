"""Accelerate's functions that dispatch a model. Libraries import them long before they call them, if they ever do: what
dispatches (`dispatching`) is imported with the first call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..devices import DeviceLike
from ..errors import PlanError

if TYPE_CHECKING:
    from ..dispatch.placement.resolve import DeviceMap
    from .offload_files import Entry


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: DeviceLike | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Entry] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    **arguments: Any,
) -> nn.Module:
    """Distribute `model` over devices as `bigmodel.dispatch_model` does, and let its modules show hooks.

    Args:
        offload_dir: Also a folder of `offload_state_dict`, to fill parameters on ``meta`` from.
        offload_index: Where parameters and buffers on ``meta`` lie, and perhaps the dtype to which they are cast.
        arguments: Further ones of `bigmodel.dispatch_model`.
    """
    from . import dispatching

    return dispatching.dispatch_model(
        model,
        device_map,
        main_device,
        state_dict,
        offload_dir,
        offload_index,
        offload_buffers,
        skip_keys,
        preload_module_classes,
        force_hooks,
        **arguments,
    )


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights on the host, as `bigmodel.cpu_offload` does, and let modules show hooks."""
    from . import dispatching

    return dispatching.cpu_offload(model, execution_device, offload_buffers, state_dict, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights on disk, as `bigmodel.disk_offload` does, and let modules show hooks."""
    from . import dispatching

    return dispatching.disk_offload(model, offload_dir, execution_device, offload_buffers, preload_module_classes)


def load_checkpoint_and_dispatch(model: nn.Module, checkpoint: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Load a checkpoint and dispatch as `bigmodel.load_checkpoint_and_dispatch` does, and let modules show hooks."""
    from . import dispatching

    return dispatching.load_checkpoint_and_dispatch(model, checkpoint, *args, **kwargs)


def refuse_recurrent_layers(model: Any) -> None:
    """Refuse a model with recurrent layers: ranks that share a sequence would each begin with an empty state.

    Raises:
        PlanError: The model's configuration names such layers.
    """
    from ..profile.trace.workload import text_config

    config: Any = getattr(model, "config", None)
    config = text_config(config) if hasattr(config, "get_text_config") else config
    recurrent = sorted({kind for kind in getattr(config, "layer_types", None) or () if "linear_attention" in kind})
    if recurrent:
        raise PlanError(
            f"{type(model).__name__} has layers of {', '.join(recurrent)}, whose state goes along the sequence: ranks "
            "cannot share one"
        )
