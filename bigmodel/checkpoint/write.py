"""Writes safetensors files, one tensor in memory at a time; also unlinked ones, for offloaded tensors."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from ..devices import format_size
from ..errors import CheckpointError, DispatchError
from ..limits import FILE_ALIGNMENT, HOST_ALIGNMENT
from ..sources.headers import DTYPES
from .mapping import MappedFile, mapped_region
from .pages import is_untouched

_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float4_e2m1fn_x2: "F4"}


@dataclass(frozen=True)
class Outgoing:
    """One tensor to be written.

    Attributes:
        name: its key in the file.
        dtype: its dtype.
        shape: its shape.
        read: returns its value, on any device; called when it is written.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Outgoing:
        """Return the entry of an existing tensor."""
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    path: Path,
    tensors: Iterable[Outgoing],
    metadata: dict[str, str] | None = None,
    advance: Callable[[int], None] | None = None,
    alignment: int = 1,
) -> dict[str, int]:
    """Write `tensors` to a new file and wait until it is on the disk.

    Args:
        path: the file; it must not exist.
        tensors: what to write.
        metadata: strings for the header.
        advance: called with the bytes written, tensor by tensor.
        alignment: bytes at whose multiples tensors begin. Beyond 1 it leaves gaps, which the format forbids: for files
            that nobody else reads.

    Returns:
        The offset of each tensor in the file, in bytes, by name.

    Raises:
        CheckpointError: a tensor has a dtype that the format does not support, or no value (is on meta).
        OSError: the file cannot be written; it names the file.
    """
    # Widest items first, as the format's own writer does, so that every tensor is aligned to its item size.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header, offsets = _header(ordered, metadata, alignment)
    with _naming(path), path.open("xb") as file:
        file.write(header)
        for tensor in ordered:
            file.write(bytes(offsets[tensor.name] - file.tell()))
            _write(file, tensor)
            if advance is not None:
                advance(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return offsets


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have errors of the system name the file: those of writing, such as a full disk, name none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _header(tensors: list[Outgoing], metadata: dict[str, str] | None, alignment: int) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position, begins = 0, {}
    for tensor in tensors:
        if tensor.name == "__metadata__":
            raise CheckpointError("a tensor is named __metadata__, which safetensors reserves; rename it")
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                f"{tensor.name} has the dtype {tensor.dtype}, which safetensors cannot hold; convert it first"
            )
        shape = list(tensor.shape)
        if tensor.dtype is torch.float4_e2m1fn_x2:  # torch counts bytes, the format elements
            shape[-1] *= 2
        begins[tensor.name] = position
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += -(-tensor.nbytes // alignment) * alignment
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # The data begin on a page boundary, so most tensors occupy whole pages of the file.
    text += b" " * (-(8 + len(text)) % FILE_ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}


def _write(file: IO[bytes], tensor: Outgoing) -> None:
    value = tensor.read().detach().resolve_conj().resolve_neg()  # files hold bytes, without such bits
    if value.is_meta:
        raise CheckpointError(f"{tensor.name} has no value (it is on meta); load or initialise the model first")
    if not value.numel() or _copied_between_files(file, value):
        return
    flat = value.cpu().contiguous().reshape(-1)
    file.write(flat.view(torch.uint8).numpy().data)


def _copied_between_files(file: IO[bytes], value: torch.Tensor) -> bool:
    """Append the bytes of an unmodified tensor of a mapped file without reading them into this process."""
    region = mapped_region(value) if value.is_contiguous() else None
    if region is None or sys.platform != "linux" or not is_untouched(value):
        return False
    source = region.open()
    if source is None:
        return False
    try:
        file.flush()
        done = 0
        while done < region.nbytes:
            sent = os.sendfile(file.fileno(), source, region.offset + done, region.nbytes - done)
            if sent == 0:
                raise CheckpointError(f"{region.path}: has become shorter since it was mapped; load the model again")
            done += sent
    finally:
        os.close(source)
    return True


def offload(
    folder: Path, tensors: Iterable[Outgoing], advance: Callable[[int], None] | None = None
) -> dict[str, torch.Tensor]:
    """Write `tensors` to a file in `folder` and return them as views of it, by name.

    The file is unlinked before this returns, so that no other model can use it, and its space is freed with the last
    tensor, also after a crash.

    Args:
        folder: folder on the file system to use; created if it does not exist.
        tensors: tensors to write; read one at a time.
        advance: called with the bytes written, tensor by tensor.

    Raises:
        DispatchError: they cannot be written there. Nothing is left in the folder.
    """
    outgoing = list(tensors)
    try:
        return _offload(folder, outgoing, advance)
    except OSError as error:
        size = format_size(sum(tensor.nbytes for tensor in outgoing))
        raise DispatchError(
            f"{folder}: {size} of offloaded weights cannot be written there ({error.strerror or error}); name a folder "
            "on a disk with as much free space"
        ) from error


def _offload(
    folder: Path, outgoing: Sequence[Outgoing], advance: Callable[[int], None] | None
) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"offload-{uuid.uuid4().hex}.safetensors"
    try:
        offsets = write_safetensors(path, outgoing, advance=advance, alignment=HOST_ALIGNMENT)
        file = MappedFile(path)
    finally:
        if path.exists():
            os.unlink(path)
    return {tensor.name: file.tensor(tensor.dtype, tensor.shape, offsets[tensor.name]) for tensor in outgoing}
