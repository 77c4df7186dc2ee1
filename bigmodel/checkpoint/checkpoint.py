"""A checkpoint on disk, validated when it is opened. Its tensors are views of the memory-mapped files."""

from __future__ import annotations

import os
from collections.abc import Iterator, KeysView, Mapping
from pathlib import Path
from typing import Protocol

import torch

from ..devices import DeviceLike
from ..errors import CheckpointFormatError, CheckpointMismatchError, CheckpointNotFoundError
from ..sources.headers import SafetensorsHeader, TensorEntry, read_header
from ..sources.index import find_checkpoint_file, merge_weight_map, read_index
from .device_lookup import DeviceLookup
from .gguf import gguf_shards
from .legacy import LEGACY_SUFFIXES, LegacyShard
from .mapping import ShardMaps


class Shard(Protocol):
    """One file of a checkpoint."""

    path: Path

    def keys(self) -> KeysView[str]:
        """Return the names of the tensors in the file."""

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape and offset of a tensor; no weight is read."""

    def tensor(self, name: str, resident: bool = False) -> torch.Tensor:
        """Return a tensor that views the mapped file; see `bigmodel.checkpoint.Checkpoint.tensor`."""


class SafetensorsShard:
    """A safetensors file, mapped on the first access to a tensor."""

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


class Checkpoint(Mapping[str, torch.Tensor]):
    """A mapping of tensor name to tensor over the files of a checkpoint. Only headers are read.

    Attributes:
        path: the index file, or the single file of weights.
        shards: its files by name.
    """

    def __init__(self, path: Path, shards: dict[str, Shard], weight_map: dict[str, str]) -> None:
        self.path = path
        self.shards = shards
        self._weight_map = weight_map

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open and check a checkpoint.

        Args:
            path: a folder, a ``.safetensors``, ``.bin`` or ``.gguf`` file, or an ``.index.json``. For a folder
                `bigmodel.sources.index.find_checkpoint_file` chooses the file.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or its index names a missing file.
            CheckpointFormatError: a file is damaged or not a checkpoint, the index names a file outside its folder, or
                index and files contradict each other.
        """
        file = find_checkpoint_file(Path(path))
        if file.suffix == ".gguf":
            found = gguf_shards(file)
            return cls(file, dict(found), merge_weight_map({n: s.keys() for n, s in found.items()}, None, str(file)))
        index = read_index(file) if file.suffix == ".json" else None
        names = [file.name] if index is None else sorted(set(index.values()))
        shards = {name: _open_shard(file.parent / name, file) for name in names}
        weight_map = merge_weight_map({name: shard.keys() for name, shard in shards.items()}, index, str(file))
        return cls(file, shards, weight_map)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weight_map)

    def __len__(self) -> int:
        return len(self._weight_map)

    def __contains__(self, name: object) -> bool:
        return name in self._weight_map

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.shards[self._weight_map[name]].tensor(name)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors in {len(self.shards)} files)"

    def file(self, name: str) -> str:
        """Return the name of the file that holds the tensor `name`, relative to the checkpoint's folder."""
        return self._weight_map[self._known(name)]

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape, size and offset of the tensor `name`; the offset is -1 if it cannot be used in place."""
        return self.shards[self.file(name)].entry(name)

    def is_mappable(self, name: str) -> bool:
        """Whether the tensor `name` can be used in its mapped file; an unaligned one must be copied."""
        entry = self.entry(name)
        return entry.nbytes == 0 or (entry.offset >= 0 and entry.offset % entry.dtype.itemsize == 0)

    def tensor(self, name: str, resident: bool = False) -> torch.Tensor:
        """Return the tensor `name`, a view of its file through a private, copy-on-write memory map.

        Nothing is read until it is used, and writing to it never changes the file. A file is mapped once, and unmapped
        when this checkpoint and all tensors of it are gone.

        A mapped file may be replaced or removed (the map keeps the old bytes), but not truncated: the kernel terminates
        a process that reads beyond the new end (SIGBUS), which Python code cannot prevent. Code that streams weights
        checks the length before it reads, and raises CheckpointFormatError.

        Args:
            name: a key of the checkpoint.
            resident: count the tensor as memory: `mapped_region` does not find it. Its pages are still read on first
                use; see `bigmodel.checkpoint.pages.populate`.
        """
        return self.shards[self.file(name)].tensor(name, resident)

    def total_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(self.entry(name).nbytes for name in self)

    def _known(self, name: str) -> str:
        if name not in self._weight_map:
            raise CheckpointMismatchError(f"{self.path}: holds no tensor {name!r}")
        return name


def _open_shard(path: Path, opened_by: Path) -> Shard:
    if not os.path.isfile(path):  # also False for an invalid file name
        if path == opened_by:
            raise CheckpointNotFoundError(f"{path}: is not a file, or is a broken link; copy or download it again")
        raise CheckpointNotFoundError(
            f"{opened_by}: names the file {path.name!r}, which is not in {path.parent}; copy or download it again"
        )
    if path.suffix == ".safetensors":
        return SafetensorsShard(path, read_header(path))
    if path.suffix not in LEGACY_SUFFIXES:
        raise CheckpointFormatError(
            f"{opened_by}: names {path.name!r} as a file of weights, but its suffix is neither .safetensors, .bin, .pt "
            "nor .pth"
        )
    return LegacyShard(path)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, DeviceLike] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, as `accelerate.utils.load_state_dict` does.

    Args:
        checkpoint_file: a file or folder, as for `Checkpoint.open`.
        device_map: module name -> device; the longest matching name decides. Tensors for the CPU and for disk are views
            of the mapped file. None leaves all on the CPU.

    Raises:
        CheckpointError: as for `Checkpoint.open`.
        DeviceMapError: the map leaves a tensor without a device.
    """
    checkpoint = Checkpoint.open(checkpoint_file)
    devices = DeviceLookup({"": "cpu"} if device_map is None else device_map)
    devices.check(checkpoint)
    return {name: checkpoint.tensor(name).to(devices.torch_device(name)) for name in checkpoint}
