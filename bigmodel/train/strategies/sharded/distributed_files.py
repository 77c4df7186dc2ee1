"""Folders of torch.distributed.checkpoint: each rank writes its own shards; read back without running any pickle.

The format (the one accelerate writes too) keeps its index and its numbers as pickles. Here the index is read by an
unpickler that knows only the classes of that index, numbers by torch's weights-only reader, and no entry may point
outside the folder.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import save

from bigmodel.errors import CheckpointError, CheckpointFormatError, CheckpointMismatchError, CheckpointNotFoundError

_INDEX = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "torch": {"Size", "device"},
}


def save_folder(state: dict[str, Any], folder: Path) -> None:
    """Write `state` to `folder`; every rank calls it and writes its part. Files are synchronised to disk.

    Raises:
        CheckpointError: some rank could not write; raised on every rank.
    """
    try:
        save(state, storage_writer=FileSystemWriter(folder, thread_count=1, sync_files=True))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{folder} was not written: process {rank} failed with {cause!r}") from error


def load_folder(state: dict[str, Any], folder: Path, *, strict: bool = True) -> None:
    """Fill the tensors of `state` in place, and replace its numbers, from `folder`; every rank calls it.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        CheckpointFormatError: its index is damaged or not of this format.
        CheckpointMismatchError: a tensor of `state` is missing (unless not `strict`) or has another shape.
    """
    reader = SafeReader(folder)
    reader.check_index()
    try:
        load(state, storage_reader=reader, planner=SafePlanner(allow_partial_load=not strict))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointMismatchError(f"{folder} does not fit the model: {cause}") from error


def read_tensors(folder: Path, keys: set[str] | None = None) -> dict[str, Any]:
    """Read whole entries of `folder` in one process, as a nested state dict; all of them when `keys` is None."""
    state: dict[str, Any] = {}
    _load_state_dict(state, SafeReader(folder), planner=_SafeEmptyPlanner(keys=keys), no_dist=True)
    return state


def read_index(folder: Path) -> Metadata:
    """Return the index of `folder`: names, shapes, dtypes and offsets of the shards."""
    return SafeReader(folder).check_index()


class SafeReader(FileSystemReader):
    """Reads a folder whose contents are not trusted."""

    def check_index(self) -> Metadata:
        """Read and check the index."""
        return self.read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, unpickled with the classes of an index only."""
        folder = Path(self.path)
        path = folder / _INDEX
        if not path.is_file():
            raise CheckpointNotFoundError(f"{folder} is not a sharded checkpoint: it has no {_INDEX} file")
        with path.open("rb") as file:
            try:
                metadata = _IndexUnpickler(file).load()
            except CheckpointFormatError:
                raise
            except Exception as error:
                raise CheckpointFormatError(f"{path} is damaged: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointFormatError(f"{path} holds a {type(metadata).__name__}, not the index of a checkpoint")
        for entry in (metadata.storage_data or {}).values():
            relative = Path(entry.relative_path)
            if relative.is_absolute() or ".." in relative.parts:
                raise CheckpointFormatError(f"{path} points outside its folder: {entry.relative_path}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Reads numbers and other small objects with torch's weights-only reader."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode one entry that is not a tensor."""
        decoded = torch.load(value, weights_only=True)
        super().load_bytes(read_item, _encoded(decoded))


class _SafeEmptyPlanner(_EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, _encoded(torch.load(value, weights_only=True)))


def _encoded(value: Any) -> io.BytesIO:
    """`value`, known to be plain, in the encoding torch's planner decodes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(
            getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
        ):
            return getattr(torch, name)
        raise CheckpointFormatError(f"the index of the checkpoint names {module}.{name}, which no index contains")
