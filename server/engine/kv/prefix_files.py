"""Files of the prefix cache: keys and values of prompt blocks that outlive their memory, and the process.

Each block is a safetensors file of its own. Its name is a SHA-256 of everything before and in the block: what the keys
and values depend on (`prefix_identity`, and what an adapter holds), and the tokens from the prompt's start. A file is
renamed into place when it is complete and on disk, so a process that is killed loses at most the blocks that are being
written. A file with another name inside, another layout, or a checksum that does not fit is deleted, and its block
computed. Where the folder cannot be written or read, blocks are computed, too, which is logged once.

Blocks are written by a thread. They are read by the caller, through the mapped file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import queue
import re
import threading
import time
import zlib
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from bigmodel.atomic_files import written_atomically
from bigmodel.devices import format_size, normalize_device, torch_device
from bigmodel.errors import ServeError
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV

logger = logging.getLogger(__name__)

LayerKV = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [key-value heads, PROMPT_BLOCK, dim] of one prompt block, by layer."""


@dataclass(frozen=True)
class HostBlock:
    """Keys and values of one prompt block on the host, and the device of each layer that they belong on."""

    layers: LayerKV
    devices: Mapping[int, str]

    @classmethod
    def copy_of(cls, layers: LayerKV) -> HostBlock:
        """The block of ``layers``, copied from accelerators. What lies on the host is shared: nobody may change it."""
        return cls(
            {layer: (key.to("cpu"), value.to("cpu")) for layer, (key, value) in layers.items()},
            {layer: normalize_device(key.device) for layer, (key, _) in layers.items()},
        )

    def put_into(self, kv: SequenceKV, index: int) -> None:
        """Write the block as prompt block ``index`` of a sequence."""
        for layer, (key, value) in self.layers.items():
            device = torch_device(self.devices[layer])
            kv.write(layer, index * PROMPT_BLOCK, key.to(device), value.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)


WAITING_BYTES = 64 << 20
"""Bytes of blocks that wait to be written, beside the one being written."""

STALE_SECONDS = 60.0
"""Age from which a temporary file is one that a killed process has left."""

SCANS = 16
"""The folder is looked through again after a process has written this part of the bytes that it may hold: others may
have written there, too."""

_FORMAT = "bigmodel prefix block 1"
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[0-9a-f]{64}")


class BlockFile(NamedTuple):
    """The file of a prompt block.

    Attributes:
        name: What it is called.
        used: The time of its use, in nanoseconds since the epoch. A prompt's first blocks are used last: the others
            are of no use without them.
    """

    name: str
    used: int


class PrefixFiles:
    """Prompt blocks in the files of a folder, which several processes may share.

    Args:
        folder: Made, for its owner alone, where there is none.
        size: Most bytes of all blocks in the folder, those of other models included. Blocks that were used least
            recently are deleted. Of several processes each may pass it by the part of it that is between two scans.
        identity: What the keys and values depend on beside the tokens, as `prefix_identity` returns it.

    Attributes:
        restored: Tokens whose keys and values were read.
        written: Bytes written.
        refused: Files that were torn or wrong.
        failure: The error of the last block that could not be written; None after one that could.

    Raises:
        ServeError: the folder cannot be used.
    """

    def __init__(self, folder: Path, size: int, identity: str) -> None:
        self.size = size
        self.restored = 0
        self.written = 0
        self.refused = 0
        self.failure: Exception | None = None
        self._is_readable = True
        self._root = folder.expanduser()
        self._folder = self._root / hashlib.sha256(identity.encode()).hexdigest()
        try:
            for path in (self._root, self._folder):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._total = sum(size for _, size, _ in self._files())
            self._unscanned = 0  # bytes written since then
        except OSError as error:
            raise ServeError(f"prefix cache: {folder} cannot be used: {error.strerror}") from error
        self._waiting: queue.Queue[tuple[BlockFile, HostBlock] | None] = queue.Queue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None

    def of(self, prompt: list[int], blocks: int, adapter: str = "") -> list[BlockFile]:
        """Files of the first ``blocks`` blocks of ``prompt``, used now, whether they exist or not.

        Args:
            prompt: The tokens.
            blocks: How many blocks.
            adapter: Digest of the adapter that computes them; "": none.
        """
        now = time.time_ns()
        found, state = [], hashlib.sha256(f"{self._folder.name}{adapter}".encode())
        for index in range(blocks):
            state.update(array("q", prompt[index * PROMPT_BLOCK : (index + 1) * PROMPT_BLOCK]).tobytes())
            found.append(BlockFile(state.hexdigest(), now - index))
        return found

    def has(self, file: BlockFile) -> bool:
        """Whether the file exists, and the folder can be looked into."""
        try:
            return self._path(file).exists()
        except OSError:
            return False

    def read_ahead(self, files: Iterable[BlockFile]) -> None:
        """Have the system read these files into memory, up to the first that is missing."""
        for file in files:
            try:
                with self._path(file).open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            except OSError:
                return

    def read(self, file: BlockFile) -> HostBlock | None:
        """The block of ``file``, which is mapped; None if there is none that is right."""
        path = self._path(file)
        try:
            with safe_open(path, "pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
                block = _checked(file.name, opened.metadata() or {}, tensors)
        except FileNotFoundError:
            return None
        except OSError as error:  # of the folder or the process, not of what the file says
            if self._is_readable:
                logger.warning("prefix cache: %s cannot be read: %s", path, error)
            self._is_readable = False
            return None
        except (SafetensorError, ValueError, KeyError) as error:
            self.refused += 1
            logger.warning("prefix cache: %s is not used: %s", path, error)
            with suppress(OSError):  # what cannot be deleted is refused again
                path.unlink()
            return None
        _touch(path, file)
        self._is_readable = True
        self.restored += PROMPT_BLOCK
        return block

    @property
    def accepts(self) -> bool:
        """Whether another block may wait to be written."""
        return self._waiting_bytes < WAITING_BYTES

    def write(self, file: BlockFile, block: HostBlock) -> None:
        """Have ``block`` written to ``file``."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="bigmodel-prefix-files", daemon=True)
            self._writer.start()
        with self._lock:
            self._waiting_bytes += block.nbytes
        self._waiting.put((file, block))

    def wait(self) -> None:
        """Wait until another block may wait to be written."""
        while not self.accepts:
            time.sleep(0.005)

    def close(self) -> None:
        """Wait until all blocks are written, and end the thread."""
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join()
            self._writer = None

    # --- the thread that writes ---------------------------------------------------------------------

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            file, block = item
            try:
                self._write(file, block)
            except Exception as error:  # whatever it is, others wait behind it
                if self.failure is None:  # a full disk stays full: it is said once
                    logger.warning("prefix cache: a block could not be written: %s", error)
                self.failure = error
            else:
                self.failure = None
            finally:
                with self._lock:
                    self._waiting_bytes -= block.nbytes

    def _write(self, file: BlockFile, block: HostBlock) -> None:
        path = self._path(file)
        if path.exists():
            return
        tensors = {
            f"{layer}.{kind}": tensor.contiguous()
            for layer, pair in block.layers.items()
            for kind, tensor in zip(("key", "value"), pair)
        }
        devices = json.dumps({str(layer): device for layer, device in block.devices.items()})
        metadata = {
            "format": _FORMAT,
            "name": file.name,
            "devices": devices,
            "checksum": str(_checksum(tensors, devices)),
        }
        data = save(tensors, metadata)
        self._make_room(len(data))
        with written_atomically(path) as opened:
            os.fchmod(opened.fileno(), 0o600)
            opened.write(data)
        _touch(path, file)
        self._total += len(data)
        self._unscanned += len(data)
        self.written += len(data)

    def _make_room(self, more: int) -> None:
        """Delete blocks, least recently used first, until ``more`` bytes fit. Other processes may write here, too."""
        if self._total + more <= self.size and self._unscanned < self.size // SCANS:
            return
        files = sorted(self._files())
        self._total, self._unscanned = sum(size for _, size, _ in files), 0
        for _, size, path in files:
            if self._total + more <= self.size:
                return
            path.unlink(missing_ok=True)
            self._total -= size
        if more > self.size:
            raise OSError(f"a block takes {format_size(more)}, more than the {format_size(self.size)} of the folder")

    # --- the folder ---------------------------------------------------------------------------------

    def _path(self, file: BlockFile) -> Path:
        return self._folder / f"{file.name}{_SUFFIX}"

    def _files(self) -> list[tuple[int, int, Path]]:
        """Time of the last use, bytes and path of each block of any model; what killed processes left is deleted."""
        found = []
        for folder in self._root.iterdir():
            if not _NAME.fullmatch(folder.name) or not folder.is_dir():
                continue
            for path in folder.iterdir():
                try:
                    status = path.stat()
                except FileNotFoundError:  # another process deleted it
                    continue
                if path.name.startswith(".") and path.suffix == ".tmp":
                    if time.time() - status.st_mtime > STALE_SECONDS:
                        path.unlink(missing_ok=True)
                elif path.suffix == _SUFFIX and _NAME.fullmatch(path.stem):
                    found.append((status.st_mtime_ns, status.st_size, path))
        return found


def _touch(path: Path, file: BlockFile) -> None:
    with suppress(OSError):  # another process deleted it, or the folder cannot be written: it is a complete file
        os.utime(path, ns=(file.used, file.used))


def _checksum(tensors: Mapping[str, torch.Tensor], devices: str) -> int:
    """CRC-32 of the names, dtypes, shapes and bytes of contiguous ``tensors``, and of the text of their devices."""
    found = zlib.crc32(devices.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _checked(name: str, metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> HostBlock:
    """Return the block of a file. Raises ValueError where it is not the complete file of that block."""
    if metadata.get("format") != _FORMAT or metadata.get("name") != name:
        raise ValueError("it is another block's, or of another format")
    if metadata.get("checksum") != str(_checksum(tensors, metadata.get("devices", ""))):
        raise ValueError("its checksum does not fit")
    devices = {int(layer): str(device) for layer, device in json.loads(metadata["devices"]).items()}
    return HostBlock({layer: (tensors[f"{layer}.key"], tensors[f"{layer}.value"]) for layer in devices}, devices)
