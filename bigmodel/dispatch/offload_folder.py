"""Weights that shall lie on disk but have no file to lie in: written once, then used like a checkpoint."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ..checkpoint import Checkpoint
from ..devices import DISK
from ..errors import DispatchError
from ..profile import storage_key
from .fused import lies_on_disk
from .parameter import like
from .placement import Placement


class TemporaryFile:
    """A file that goes away when nobody holds this object any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remove = weakref.finalize(self, path.unlink, missing_ok=True)


class OffloadFolder:
    """Writes the weights of a model that are mapped to disk and do not lie in a memory-mapped file yet.

    Every call writes a file of a new name, so weights of another model in the same folder are never mistaken for
    this one's.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.files: list[TemporaryFile] = []

    def write(self, model: nn.Module, placement: Placement) -> None:
        """Write what must be written and let the model's parameters view the file instead.

        Raises:
            DispatchError: Something must be written and no folder was given.
        """
        places = [
            placed
            for placed in placement.tensors(model)
            if placed.device == DISK
            and not placed.is_buffer
            and not placed.tensor.is_meta
            and not lies_on_disk(placed.tensor)
        ]
        if not places:
            return
        if self.folder is None:
            raise DispatchError(
                f"{places[0].name} is mapped to 'disk' but lies in memory: give offload_dir=, a folder to write "
                f"{len(places)} tensors to, or load the model with load_checkpoint_and_dispatch, which uses the "
                "checkpoint where it lies"
            )
        names: dict[object, str] = {}
        for placed in places:
            names.setdefault(storage_key(placed.tensor), placed.name)
        path = self._save({names[storage_key(p.tensor)]: p.tensor for p in places})
        views = Checkpoint.open(path)
        shown: dict[str, torch.Tensor] = {}
        for placed in places:
            name = names[storage_key(placed.tensor)]
            if name not in shown:
                shown[name] = like(placed.tensor, views.tensor(name))
            placed.registry[placed.key] = shown[name]

    def discard(self) -> None:
        """Remove what was written."""
        for file in self.files:
            file.remove()

    def _save(self, tensors: Mapping[str, torch.Tensor]) -> Path:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"offload-{uuid.uuid4().hex}.safetensors"
        partial = path.with_suffix(".partial")
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self.files.append(TemporaryFile(path))
        return path


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
