"""Checkpoints that store experts one by one, used in place.

A model of transformers v5 has the experts of a layer as one tensor; most checkpoints store them separately. To map them
to disk the loader would have to write the fused tensors to another file. Instead it gets a `Checkpoint` that contains
the fused tensors, as `FusedView`s of the original files.
"""

from __future__ import annotations

import os
from collections.abc import KeysView, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint import Checkpoint, Conversion, TensorSource, convert_keys, load_checkpoint_in_model
from ...checkpoint.checkpoint import Shard
from ...checkpoint.device_lookup import DeviceLookup
from ...devices import DISK, DeviceLike
from ...quantized.stored import published
from ...sources.headers import TensorEntry
from ..weights.fused_view import FusedView, PartOfTensor

_FILE = "fused experts"


class FusedShard:
    """A virtual shard of a checkpoint, whose tensors are fused views of tensors in its files."""

    def __init__(self, checkpoint: Checkpoint, sources: Mapping[str, TensorSource]) -> None:
        self.path = checkpoint.path
        self._checkpoint = checkpoint
        self._sources = dict(sources)

    def keys(self) -> KeysView[str]:
        """Return the names of the fused tensors."""
        return self._sources.keys()

    def entry(self, name: str) -> TensorEntry:
        """Return dtype and shape of a fused tensor, with the offset of its first part, which has the same alignment."""
        source = self._sources[name]
        nbytes = sum(self._checkpoint.entry(key).nbytes for key in source.keys)
        return TensorEntry(name, source.dtype, source.shape, self._checkpoint.entry(source.keys[0]).offset, nbytes)

    def tensor(self, name: str, resident: bool = False) -> torch.Tensor:
        """Return a fused tensor; nothing is read."""
        source = self._sources[name]
        assert source.fusion is not None
        fused_parts = source.fusion.parts()
        assert fused_parts is not None
        parts = [PartOfTensor(self._checkpoint.tensor(part.key, resident), part.index) for part in fused_parts]
        return FusedView(parts, source.shape)


def load_in_place(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Checkpoint,
    device_map: Mapping[str, DeviceLike] | None,
    **options: Any,
) -> None:
    """Load `checkpoint` into `model` as `load_checkpoint_in_model` does, but leave experts that are mapped to disk, and
    stored one by one, in their files.

    Args:
        model: Any module.
        checkpoint: A folder or file, or one that is open.
        device_map: Device by module name; None loads every tensor to its present device.
        options: Further arguments of `load_checkpoint_in_model`.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(Path(checkpoint))
    conversion = None
    if device_map is not None and DISK in device_map.values():
        conversion = _conversion(model, opened)
        opened = with_fused_views(opened, conversion, device_map)
    load_checkpoint_in_model(model, opened, device_map=device_map, **options)
    if conversion is not None and conversion.used is not None:
        # The loader did not convert the experts, but transformers needs the conversions to save in the same layout.
        model._weight_conversions = conversion.used  # type: ignore[assignment]


def with_fused_views(
    checkpoint: Checkpoint, conversion: Conversion, device_map: Mapping[str, DeviceLike]
) -> Checkpoint:
    """Return `checkpoint` with tensors to be fused that are mapped to disk replaced by fused views of them."""
    devices = DeviceLookup(device_map)
    fused = {
        name: source
        for name, source in conversion.sources.items()
        if source.fusion is not None
        and devices.find(name) == DISK
        and source.fusion.parts() is not None
        and all(checkpoint.is_mappable(key) for key in source.keys)
    }
    if not fused:
        return checkpoint
    replaced = {key for source in fused.values() for key in source.keys}
    weight_map = {key: checkpoint.file(key) for key in checkpoint if key not in replaced} | dict.fromkeys(fused, _FILE)
    shards: dict[str, Shard] = {**checkpoint.shards, _FILE: FusedShard(checkpoint, fused)}
    return Checkpoint(checkpoint.path, shards, weight_map)


def _conversion(model: nn.Module, checkpoint: Checkpoint) -> Conversion:
    found = published(model)
    names = dict.fromkeys(model.state_dict(), True)
    known = None if found is None else found.sources
    return convert_keys(model, names, {name: checkpoint.entry(name) for name in checkpoint}, known)
