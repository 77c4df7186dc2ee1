"""GGUF files as shards of a checkpoint, whose tensors have transformers' names and lie where they are in the files."""

from __future__ import annotations

from collections.abc import KeysView, Mapping
from pathlib import Path

import torch

from ..sources.gguf.header import GgufTensor
from ..sources.gguf.model import GgufModel
from ..sources.headers import TensorEntry
from .mapping import ShardMaps


class GgufShard:
    """One GGUF file of a model.

    Args:
        model: the model.
        path: the file.
        maps: maps of all files of the model by name; a tensor may be computed from parts in several.
    """

    def __init__(self, model: GgufModel, path: Path, maps: Mapping[str, ShardMaps]) -> None:
        self.path = path
        self._model, self._maps = model, maps
        self._entries = model.entries(path.name)

    def keys(self) -> KeysView[str]:
        return self._entries.keys()

    def entry(self, name: str) -> TensorEntry:
        return self._entries[name]

    def tensor(self, name: str, resident: bool = False) -> torch.Tensor:
        named, entry = self._model.named[name], self._entries[name]
        if named.compute is None:
            file = self._maps[self.path.name].get(resident)
            return file.tensor(entry.dtype, entry.shape, entry.offset)
        return named.compute(*(self._as_stored(part) for part in named.parts))

    def _as_stored(self, part: GgufTensor) -> torch.Tensor:
        return self._maps[part.file].get(True).tensor(part.dtype, part.stored_shape, part.offset)


def gguf_shards(path: Path) -> dict[str, GgufShard]:
    """Return the files of the model that the GGUF file `path` belongs to, by name.

    Raises:
        CheckpointError: a file is missing or damaged, or the architecture is not supported.
    """
    model = GgufModel(path)
    maps = {name: ShardMaps(header.path, header.file_size) for name, header in model.headers.items()}
    return {name: GgufShard(model, header.path, maps) for name, header in model.headers.items()}
