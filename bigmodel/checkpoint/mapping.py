"""Memory-mapped files: private, copy-on-write maps whose bytes back tensors without being read first.

torch.UntypedStorage.from_file is not used: it maps without ``MAP_NORESERVE``, so that the kernel reserves memory for
copy-on-write and refuses to map files larger than the machine's memory.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from ..devices.forks import new_rlock
from ..errors import CheckpointError, CheckpointFormatError
from ..limits import VECTOR_BYTES
from .pages import is_untouched

_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x0040}.get(sys.platform, 0)
"""Reserve no memory for copy-on-write. The value is the same on all architectures that torch supports."""

_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """The byte range of a file that backs a tensor.

    Attributes:
        path: the name of the file when it was mapped.
        offset: position of the tensor's first element in the file, in bytes.
        nbytes: bytes from the offset to the end of the tensor's last element.
        device: identifies the mapped file together with `inode`: another file may have its name by now.
        inode: see `device`.
    """

    path: Path
    offset: int
    nbytes: int
    device: int
    inode: int

    def open(self) -> int | None:
        """Open the mapped file for reading and return its descriptor; None if its name is gone or names another file.

        A new checkpoint may be saved under the names of the mapped one. The map still shows the old bytes then. The
        caller closes the descriptor.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            return None
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            os.close(descriptor)
            return None
        return descriptor


class MappedFile:
    """A private map of a whole file, which lives as long as this object or any tensor made from it.

    Args:
        path: the file.
        track: whether `mapped_region` finds the tensors made from this map.

    Raises:
        CheckpointError: the kernel refuses to map the file.
    """

    def __init__(self, path: Path, track: bool = True) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            self.nbytes = status.st_size
            address = _map(descriptor, self.nbytes, path)
        finally:
            os.close(descriptor)
        # torch.frombuffer keeps this object alive as long as a storage uses its bytes.
        self._bytes = (ctypes.c_char * self.nbytes).from_address(address)
        _track(_Tracked(address, self.nbytes, path, status.st_dev, status.st_ino, on_disk=track))
        # Not at exit: a thread may still be reading, and the kernel unmaps the file anyway.
        weakref.finalize(self._bytes, _unmap, address, self.nbytes).atexit = False

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a tensor backed by the bytes at `offset`, with a storage of exactly its size.

        Empty tensors are allocated. A tensor whose offset is not a multiple of its item size, which the format allows,
        is copied.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=nbytes, offset=offset)
        if offset % dtype.itemsize:
            raw = raw.clone()
        # Not `raw.view(dtype)`: the result would be a view of a hidden base tensor.
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape)  # type: ignore[call-overload]


class ShardMaps:
    """The two maps of one file, each made on first use.

    One map is for tensors that stay on disk, the other for tensors that count as memory. `mapped_region` finds only
    tensors of the first.
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


def mapped_region(tensor: torch.Tensor) -> MappedRegion | None:
    """Return the byte range that backs `tensor`, a Parameter or a view; None if no tracked map backs it.

    Elements written in memory differ from the file: see `is_untouched`.
    """
    found = _file_of(tensor)
    if found is None or not found.on_disk:
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.data_ptr() - found.start
    return MappedRegion(found.path, offset, span * tensor.element_size(), found.device, found.inode)


def mapped_file(tensor: torch.Tensor) -> MappedRegion | None:
    """Return all of the file whose map backs `tensor`, also one that counts as memory; None if none does."""
    found = _file_of(tensor)
    return None if found is None else MappedRegion(found.path, 0, found.nbytes, found.device, found.inode)


class MapsAgain:
    """Maps the files of mapped tensors again, each once, for tensors that are written to apart from these."""

    def __init__(self) -> None:
        self._files: dict[int, MappedFile | None] = {}

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what the file of `tensor` holds in its place.

        Returns:
            None if no map backs it, if it was written to, or if the file is gone.
        """
        found = _file_of(tensor)
        if found is None or not tensor.is_contiguous() or not is_untouched(tensor):
            return None
        if found.start not in self._files:
            self._files[found.start] = found.again()
        file = self._files[found.start]
        if file is None:
            return None
        return file.tensor(tensor.dtype, tuple(tensor.shape), tensor.data_ptr() - found.start)


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a map backs `tensor`, also one that counts as memory."""
    return _file_of(tensor) is not None


def is_misaligned(tensor: torch.Tensor) -> bool:
    """Whether a map backs `tensor`, also one that counts as memory, and the file does not align it for the host."""
    return _file_of(tensor) is not None and tensor.data_ptr() % VECTOR_BYTES != 0


def _file_of(tensor: torch.Tensor) -> _Tracked | None:
    """Return the map that backs `tensor`; None if none does."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a tensor without storage: a wrapper subclass, a fake tensor
        return None
    starts = _starts  # one read: another thread may replace it
    index = bisect.bisect_right(starts, address) - 1
    tracked = _tracked.get(starts[index]) if index >= 0 else None
    if tracked is None or address >= tracked.start + tracked.nbytes or tensor.numel() == 0:
        return None
    return tracked


@dataclass(frozen=True, slots=True)
class _Tracked:
    """A map. Tensors of one that is not `on_disk` count as memory."""

    start: int
    nbytes: int
    path: Path
    device: int
    inode: int
    on_disk: bool

    def again(self) -> MappedFile | None:
        """Return another map of the file; None if its name is gone or names another file."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        if (status.st_dev, status.st_ino, status.st_size) != (self.device, self.inode, self.nbytes):
            return None
        return MappedFile(self.path, track=self.on_disk)


_tracked: dict[int, _Tracked] = {}
_starts: tuple[int, ...] = ()
# Reentrant: a finalizer may run in a thread that holds the lock.
_lock = new_rlock()


def _track(mapped: _Tracked) -> None:
    global _starts
    with _lock:
        _tracked[mapped.start] = mapped
        _starts = tuple(sorted(_tracked))


def _map(descriptor: int, nbytes: int, path: Path) -> int:
    if _libc is None:
        raise CheckpointError(f"{path}: files can be mapped on Linux and macOS only")
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
    address = _libc.mmap(None, nbytes, protection, flags, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise CheckpointError(
            f"{path}: {nbytes} bytes cannot be mapped into memory ({os.strerror(error)}); "
            "check `ulimit -v` and, on Linux, vm.overcommit_memory=2"
        )
    return int(address)


def _unmap(address: int, nbytes: int) -> None:
    global _starts
    with _lock:  # before another map can get the address
        _tracked.pop(address, None)
        _starts = tuple(sorted(_tracked))
    assert _libc is not None
    _libc.munmap(address, nbytes)
