"""One file of a checkpoint: what it holds, and its tensors as views of the mapped file."""

from __future__ import annotations

from collections.abc import KeysView
from pathlib import Path
from typing import Protocol

import torch

from ..errors import CheckpointFormatError
from ..sources.headers import SafetensorsHeader, TensorEntry
from .mapping import MappedFile


class Shard(Protocol):
    """One file of a checkpoint."""

    path: Path

    def keys(self) -> KeysView[str]:
        """Names of the tensors in the file."""

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and place of a tensor; no weight is read."""

    def tensor(self, name: str, resident: bool = False) -> torch.Tensor:
        """A tensor that shows the mapped file; see `bigmodel.checkpoint.Checkpoint.tensor`."""


class ShardMaps:
    """The maps of one file, each made when it is first wanted.

    There are two, for what shall stay on disk and for what shall count as memory: `mapped_region` finds only the first.
    """

    def __init__(self, path: Path, file_size: int) -> None:
        self._path = path
        self._file_size = file_size
        self._maps: dict[bool, MappedFile] = {}

    def get(self, resident: bool) -> MappedFile:
        if resident not in self._maps:
            file = MappedFile(self._path, track=not resident)
            if file.nbytes != self._file_size:
                raise CheckpointFormatError(
                    f"{self._path}: was {self._file_size} bytes long when its header was read and is {file.nbytes} "
                    "now; open the checkpoint again once nothing writes to it"
                )
            self._maps[resident] = file
        return self._maps[resident]


class SafetensorsShard:
    """A safetensors file, mapped when its first tensor is asked for."""

    def __init__(self, path: Path, header: SafetensorsHeader) -> None:
        self.path = path
        self.header = header
        self._maps = ShardMaps(path, header.file_size)

    def keys(self) -> KeysView[str]:
        return self.header.keys()

    def entry(self, name: str) -> TensorEntry:
        return self.header[name]

    def tensor(self, name: str, resident: bool = False) -> torch.Tensor:
        entry = self.header[name]
        return self._maps.get(resident).tensor(entry.dtype, entry.shape, entry.offset)
