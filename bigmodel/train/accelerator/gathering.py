"""Collective operations of the Accelerator: tensors, metrics, and a trigger that any process can set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigmodel.devices.nested import first_tensor
from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.collectives import gather, gather_object, gather_uneven, pad_across_processes, reduce
from bigmodel.train.data.loader import DataLoaderShard
from bigmodel.train.nested import map_members
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.state.partial import PartialState


class Exchange(AcceleratorCore):
    """Operations across processes."""

    _trigger: bool

    def gather(self, tensor: Any) -> Any:
        """Return every process's tensors concatenated along the first dimension."""
        return gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results computed from the current batch, exactly one entry per sample of the dataset.

        See `bigmodel.train.accelerator.gathering.gather_for_metrics`.
        """
        return gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the "sum", "mean" or "max" over processes of every tensor, times `scale`."""
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors along `dim` to the largest size on any process."""
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Set this process's flag, which every process sees in `check_trigger`."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any process has set its flag since the last check, and clear all flags.

        Every process must call it.
        """
        raised = reduce(torch.tensor([int(self._trigger)], device=self.device), "sum")
        if int(raised.item()) == 0:
            return False
        self._trigger = False
        return True


def gather_for_metrics(data: Any, use_gather_object: bool = False) -> Any:
    """Return the data of all processes without that of repeated samples.

    In the last, uneven, round each process removes repeated samples before sending: from tensors and lists whose length
    is the batch's or a multiple of it; a scalar is removed only if all its samples are repeated. A tensor of one value,
    repeated for each sample of a full batch, as transformers' Trainer repeats the mean loss, is cut where the last
    batch is shorter.

    Args:
        data: nested lists, tuples and dicts of tensors, and lists of other objects (strings, numbers, ...).
        use_gather_object: treat `data` as one list of any objects, for example tensors of different
            shapes. A tensor is the list of its rows.
    """
    active = GradientState().active_dataloader
    shard = active if isinstance(active, DataLoaderShard) else None
    if not PartialState().use_distributed:
        if shard is None or not shard.end_of_dataloader or use_gather_object:
            return data
        return _without_repeats(data, shard)
    loader = shard if shard is not None and shard.is_uneven else None
    if use_gather_object:
        return _gather_objects(data, loader)
    return _gather(data, loader)


def _gather(data: Any, loader: DataLoaderShard | None) -> Any:
    if isinstance(data, Tensor):
        return gather(data) if loader is None else gather_uneven(_own_rows(data, loader))
    if isinstance(data, Mapping):
        return map_members(lambda value: _gather(value, loader), data)
    if isinstance(data, (list, tuple)) and _holds_tensors(data):
        return map_members(lambda item: _gather(item, loader), data)
    return _gather_objects(data, loader)


def _holds_tensors(data: Any) -> bool:
    return first_tensor(data) is not None


def _without_repeats(data: Any, loader: DataLoaderShard) -> Any:
    if isinstance(data, Tensor):
        return data[: loader.rows] if _repeats_for_a_full_batch(data, loader) else data
    if isinstance(data, (Mapping, list, tuple)) and _holds_tensors(data):
        return map_members(lambda item: _without_repeats(item, loader), data)
    return data


def _repeats_for_a_full_batch(tensor: Tensor, loader: DataLoaderShard) -> bool:
    """Whether a tensor has one value for as many samples as a full batch has, which the current one has not."""
    full = loader.batch_size
    if tensor.ndim == 0 or full is None or tensor.shape[0] != full or not 0 < loader.rows < full:
        return False
    return bool((tensor == tensor[:1]).all())


def _own_rows(tensor: Tensor, loader: DataLoaderShard) -> Tensor:
    if tensor.ndim == 0:
        return tensor.reshape(1)[: int(loader.has_real)]
    if _repeats_for_a_full_batch(tensor, loader):
        tensor = tensor[: loader.rows]
    return tensor[: loader.count_real(tensor.shape[0])]


def _gather_objects(data: Any, loader: DataLoaderShard | None) -> Any:
    if isinstance(data, Tensor) and data.ndim:
        data = list(data)
    if not isinstance(data, (list, tuple)):
        own = [data] if loader is None or loader.has_real else []
        return gather_object(own)
    own = list(data) if loader is None else list(data[: loader.count_real(len(data))])
    return gather_object(own)
