"""Load into a model that several processes share: made of DTensors, or read by one process for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..devices import HOST
from ..errors import CheckpointError
from .checkpoint import Checkpoint
from .match import Wanted, match
from .read import Reader


def is_distributed_load(model: nn.Module, device_map: Mapping[str, object] | None, broadcast: bool) -> bool:
    """Whether loading concerns more processes than this one.

    Raises:
        CheckpointError: one process shall read for all, and there is only one, or a device map besides.
    """
    if broadcast and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise CheckpointError(
            "broadcast_from_rank0=True needs torch.distributed.init_process_group() first; without it every "
            "process reads the checkpoint itself"
        )
    if broadcast and device_map is not None:
        raise CheckpointError("broadcast_from_rank0=True and a device_map exclude each other; leave out one of them")
    return device_map is None and (broadcast or any(_is_distributed(p) for p in model.parameters()))


def load_distributed(
    model: nn.Module, checkpoint: Checkpoint, strict: bool, full_state_dict: bool, broadcast_from_rank0: bool
) -> None:
    """Fill `model` on every process of the group; all must call this.

    Arguments are those of `bigmodel.checkpoint.load_checkpoint_in_model`.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values: dict[str, Any] = {}
    if not broadcast_from_rank0 or torch.distributed.get_rank() == 0:
        assignments, _ = match(model, checkpoint, Wanted(None, None, (), strict))
        on_host = [replace(assignment, device=HOST) for assignment in assignments]
        read = Reader(checkpoint, offload_buffers=False, offload_folder=None).read(on_host)
        values = {name: read[a.name] for a in assignments for name in a.slot.names}
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    set_model_state_dict(model, values, options=options)


def _is_distributed(tensor: torch.Tensor) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__) or hasattr(tensor, "_local_tensor")
