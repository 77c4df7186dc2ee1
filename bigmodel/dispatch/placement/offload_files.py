"""Offload files: weights mapped to disk that are in no file yet are written once, then used like a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ...checkpoint import Checkpoint
from ...checkpoint.write import Outgoing, offload
from ...devices import DISK
from ...errors import DispatchError
from ...profile import storage_key
from ..weights.fused_view import lies_on_disk
from ..weights.parameters import like, take_over
from .tensors import DeviceMapLookup, PlacedTensor


def write_to_disk(model: nn.Module, placement: DeviceMapLookup, folder: str | Path | None) -> None:
    """Write weights that are mapped to disk but are in no memory-mapped file yet to a file in `folder`, and make the
    model's parameters views of it. Its space is freed with them.

    Raises:
        DispatchError: Weights must be written and `folder` is None.
    """
    places = [
        placed
        for placed in placement.tensors(model)
        if placed.storage_device == DISK
        and not placed.is_buffer
        and not placed.tensor.is_meta
        and not lies_on_disk(placed.tensor)
    ]
    if not places:
        return
    if folder is None:
        raise DispatchError(
            f"{places[0].name} is mapped to 'disk' but lies in memory: give offload_dir=, a folder to write "
            f"{len(places)} tensors to, or load the model with load_checkpoint_and_dispatch, which uses the "
            "checkpoint where it lies"
        )
    keyed = [(storage_key(placed.tensor), placed) for placed in places]
    first: dict[object, PlacedTensor] = {}
    for where, placed in keyed:
        first.setdefault(where, placed)
    views = offload(Path(folder), [Outgoing.of(placed.name, placed.tensor) for placed in first.values()])
    names = Counter(id(placed.tensor) for placed in placement.tensors(model))
    names.subtract(id(placed.tensor) for placed in places)
    replacements = {}
    for key, placed in first.items():
        view = like(placed.tensor, views[placed.name])
        stays = names[id(placed.tensor)] > 0  # in memory, for another module
        replacements[key] = view if stays or not take_over(placed.tensor, view) else placed.tensor
    for where, placed in keyed:
        placed.registry[placed.key] = replacements[where]


def fill_meta(
    model: nn.Module,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_index: Mapping[str, Mapping[str, str]] | None = None,
    offload_dir: str | Path | None = None,
) -> None:
    """Give parameters on meta their values: from `state_dict`, from the files that `offload_index` names, or from
    the checkpoint in `offload_dir`."""
    meta = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta}
    if not meta:
        return
    checkpoints: dict[str, Checkpoint] = {}
    folder = None
    if offload_dir is not None and any(Path(offload_dir).glob("*.safetensors")):
        folder = Checkpoint.open(offload_dir)
    for name, parameter in meta.items():
        value = None if state_dict is None else state_dict.get(name)
        entry = None if offload_index is None else offload_index.get(name)
        if value is None and entry is not None and "safetensors_file" in entry:
            file = entry["safetensors_file"]
            checkpoint = checkpoints.setdefault(file, Checkpoint.open(file))
            value = checkpoint.tensor(entry.get("weight_name", name))
        if value is None and folder is not None and name in folder:
            value = folder.tensor(name)
        if value is not None:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._parameters[key] = like(parameter, value)  # type: ignore[assignment]
