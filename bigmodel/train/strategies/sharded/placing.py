"""Broadcasts rank 0's weights to every rank, unit by unit, before they are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigmodel.errors import TrainError


class WeightBroadcaster:
    """Moves a model's tensors to their device with rank 0's values, one unit at a time.

    Only one unit is whole at a time, so that a rank's peak is its shards and one unit. Meta tensors (ranks other than 0
    may build the model without weights) are made real. Ties stay ties.

    Args:
        groups: process groups to broadcast over, outermost first.
        keep_on_cpu: parameters stay in RAM, where their shards will live.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, groups: Sequence[Any], *, keep_on_cpu: bool = False
    ) -> None:
        self._model = model
        self._device = device
        self._groups = groups
        self._parameter_device = torch.device("cpu") if keep_on_cpu else device
        self._done: set[int] = set()

    def place(self, unit: nn.Module) -> None:
        """Place the tensors of `unit` that belong to no inner unit."""
        for module in unit.modules():
            if id(module) in self._done:
                continue
            self._done.add(id(module))
            for parameter in list(module._parameters.values()):
                if parameter is not None and not isinstance(parameter, DTensor):
                    self._place_parameter(parameter)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = self._received(buffer, self._device)

    def _place_parameter(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._done:
            return
        value = self._received(parameter.data, self._parameter_device)
        if not parameter.is_meta:
            parameter.data = value
            self._done.add(id(parameter))
            return
        fresh = nn.Parameter(value, requires_grad=parameter.requires_grad)
        self._done.add(id(fresh))
        for module in self._model.modules():
            for name, own in module._parameters.items():
                if own is parameter:
                    module._parameters[name] = fresh

    def _received(self, tensor: Tensor, target: torch.device) -> Tensor:
        """Return rank 0's values of `tensor` on `target`, broadcast over the process group's device."""
        if tensor.is_meta:
            travelling = torch.empty_like(tensor, device=self._device)
        else:
            travelling = tensor.detach().to(self._device).contiguous()
        for group in self._groups:
            dist.broadcast(travelling, src=dist.get_global_rank(group, 0), group=group)
        return travelling.to(target)


def check_same_structure(model: nn.Module) -> None:
    """Raise TrainError on every rank if the ranks' models differ in the names, shapes or ties of their tensors.

    Without this, a collective over parameters that do not match would wait forever.
    """
    first: dict[int, str] = {}
    own = [
        (name, tuple(parameter.shape), str(parameter.dtype), first.setdefault(id(parameter), name))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for rank, other in enumerate(every):
        if other != every[0]:
            differing = next((b for a, b in zip(every[0], other, strict=False) if a != b), other[-1:])
            raise TrainError(
                f"the model of rank {rank} differs from that of rank 0 at {differing} (name, shape, dtype, tied to); "
                "build the same model on every rank"
            )


def groups_of(mesh: Any) -> list[Any]:
    """Return the process groups of every dimension of `mesh`, the outermost first."""
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
