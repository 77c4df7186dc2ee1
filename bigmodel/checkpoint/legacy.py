"""A legacy ``.bin`` file, written by ``torch.save``. Only tensors are unpickled, never code.

Such a file is a zip archive of one pickle and one uncompressed record per storage, so its tensors can be used in place
too. Loading it to ``meta`` with torch gives the record of each tensor.
"""

from __future__ import annotations

import logging
import pickle
import sys
import zipfile
from collections.abc import KeysView
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointFormatError, CheckpointNotFoundError
from ..sources.headers import TensorEntry
from .mapping import ShardMaps

logger = logging.getLogger(__name__)

_ADVICE = ("Weights only load failed", "(1)", "(2)", "Check the documentation")
LEGACY_SUFFIXES = (".bin", ".pt", ".pth")
NOT_IN_PLACE = -1
"""The offset of a tensor that cannot be used in place: the file format is too old, or needs conversion by torch."""


class LegacyShard:
    """A ``.bin`` file. Only its pickle is read, unless its tensors cannot be used in place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        records = _plain_records(path)
        # Not to meta if torch converts the byte order: it does so even on meta, and crashes.
        self._tensors = _tensors(path, _unpickle(path, "meta" if records else "cpu"))
        self._offsets = {name: _offset(path, name, tensor, records) for name, tensor in self._tensors.items()}
        self._maps = ShardMaps(path, path.stat().st_size)
        self._loaded = None if records else self._tensors

    def keys(self) -> KeysView[str]:
        return self._tensors.keys()

    def entry(self, name: str) -> TensorEntry:
        tensor = self._tensors[name]
        return TensorEntry(name, tensor.dtype, tuple(tensor.shape), self._offsets[name], tensor.nbytes)

    def tensor(self, name: str, resident: bool = False) -> torch.Tensor:
        offset = self._offsets[name]
        if offset == NOT_IN_PLACE:
            if self._loaded is None:
                self._loaded = _tensors(self.path, _unpickle(self.path, "cpu"))
            return self._loaded[name].contiguous()
        meta = self._tensors[name]
        return self._maps.get(resident).tensor(meta.dtype, tuple(meta.shape), offset)


def _unpickle(path: Path, device: str) -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointFormatError(
            f"{path}: holds more than tensors, and loading it could run code, or is damaged ({_reason(error)}); "
            "if you trust it, load it with torch.load and write it again with bigmodel.save_model"
        ) from error
    except Exception as error:  # torch raises arbitrary exceptions for damaged files
        raise CheckpointFormatError(
            f"{path}: is not a file of torch.save, or is damaged ({_reason(error)}); copy or download it again"
        ) from error


def _reason(error: Exception) -> str:
    """Return the line of torch's message with the reason, without its advice to load the file unsafely."""
    lines = [line.strip() for line in str(error).splitlines()]
    met = next((line for line in lines if line and not line.startswith(_ADVICE)), type(error).__name__)
    return met.removeprefix("WeightsUnpickler error: ").partition(". Please use")[0][:200]


def _tensors(path: Path, content: Any) -> dict[str, torch.Tensor]:
    if not isinstance(content, dict):
        raise CheckpointFormatError(
            f"{path}: holds a {type(content).__name__}, but a mapping of names to tensors is expected"
        )
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointFormatError(
                f"{path}: {name!r} is a {type(value).__name__}, not a tensor; if the weights lie within it, "
                "write them to a file of their own"
            )
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointFormatError(f"{path}: {name!r} is sparse or quantized; only plain tensors can be loaded")
    return {name: value.detach() for name, value in content.items()}


def _plain_records(path: Path) -> dict[int, int]:
    """Return the size in bytes of each record of a storage by its offset; empty if any record needs conversion."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            records: dict[int, int] = {}
            file_size = path.stat().st_size
            for info in archive.infolist():
                kind = info.filename.partition("/")[2]
                if kind == "byteorder" and archive.read(info).decode() != sys.byteorder:
                    return {}
                if not kind.startswith("data/"):
                    continue
                if info.compress_type != zipfile.ZIP_STORED:
                    return {}
                # The bytes begin after the local header, whose own name and padding may differ from the directory's.
                file.seek(info.header_offset + 26)
                lengths = file.read(4)
                start = info.header_offset + 30
                start += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                if start + info.file_size > file_size:
                    return {}
                records[start] = info.file_size
            return records
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: there is no such file") from error
    except Exception:  # no valid zip: torch reports the reason, or reads the older format
        logger.debug("%s: is no plain zip archive", path, exc_info=True)
        return {}


def _offset(path: Path, name: str, tensor: torch.Tensor, records: dict[int, int]) -> int:
    """Return the file offset of the contiguous elements of a tensor loaded to ``meta``, or `NOT_IN_PLACE`."""
    storage = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if not records or start is None or not tensor.is_contiguous() or tensor.numel() == 0:
        return NOT_IN_PLACE
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if records.get(start) != storage.nbytes() or begin + tensor.nbytes > storage.nbytes():
        raise CheckpointFormatError(
            f"{path}: {name!r} requires {storage.nbytes()} bytes of storage, but the file holds "
            f"{records.get(start, 0)}: it is damaged; copy or download it again"
        )
    return int(start) + begin
