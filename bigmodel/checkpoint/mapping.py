"""Files as memory: private, copy-on-write maps whose bytes become tensors without being read first.

torch.UntypedStorage.from_file would do, but for one thing: the kernel refuses to map a file larger than the machine's
memory that way, for it counts what copy-on-write might come to need. Big models are what this project is for.
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

_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x0040}.get(sys.platform, 0)
"""Do not count the map against the machine's memory. Its value is the same on the architectures that torch has."""

_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """Where in which file the bytes of a tensor lie.

    Attributes:
        path: the file, as it was named when it was mapped.
        offset: first byte of the tensor's first element, counted from the beginning of the file.
        nbytes: bytes from there to the end of the tensor's last element.
        device: with `inode`, which file that was: another may bear the name by now.
        inode: see `device`.
    """

    path: Path
    offset: int
    nbytes: int
    device: int
    inode: int

    def open(self) -> int | None:
        """A descriptor of the mapped file for reading, to be closed by the caller; None if it is not there any more.

        A checkpoint may be saved anew under the names of the one that is mapped. The map then still shows the old
        bytes, which no file of that name holds.
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
    """A whole file as private memory. The map lives as long as this object or any tensor made from it.

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
        # torch.frombuffer keeps this object alive for as long as a storage shows its bytes.
        self._bytes = (ctypes.c_char * self.nbytes).from_address(address)
        if track:
            _track(address, self.nbytes, path, status)
        # Not at exit: a thread may still be reading, and the kernel cleans up better.
        weakref.finalize(self._bytes, _unmap, address, self.nbytes, track).atexit = False

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor that shows the bytes at `offset`; each has a storage of its own, as long as the tensor.

        An empty tensor, and one whose offset is no multiple of its item size (the format allows that), is a copy.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=nbytes, offset=offset)
        if offset % dtype.itemsize:
            raw = raw.clone()
        # Not `raw.view(dtype)`: the result would be a view of a tensor nobody sees.
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape)  # type: ignore[call-overload]


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


def mapped_region(tensor: torch.Tensor) -> MappedRegion | None:
    """Where the bytes of `tensor` lie on disk, if it shows a tracked map: itself, as a view, or as a Parameter.

    Elements changed in memory since are not in the file: see `is_untouched`.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own: a wrapper subclass, a fake tensor
        return None
    starts = _starts  # another thread may replace it at any moment
    index = bisect.bisect_right(starts, address) - 1
    tracked = _tracked.get(starts[index]) if index >= 0 else None
    if tracked is None or address >= tracked.start + tracked.nbytes or tensor.numel() == 0:
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return MappedRegion(
        tracked.path, address - tracked.start, span * tensor.element_size(), tracked.device, tracked.inode
    )


@dataclass(frozen=True, slots=True)
class _Tracked:
    start: int
    nbytes: int
    path: Path
    device: int
    inode: int


_tracked: dict[int, _Tracked] = {}
_starts: tuple[int, ...] = ()
# Reentrant: a finalizer may run at any moment, also in a thread that holds the lock.
_lock = new_rlock()


def _track(address: int, nbytes: int, path: Path, status: os.stat_result) -> None:
    global _starts
    with _lock:
        _tracked[address] = _Tracked(address, nbytes, path, status.st_dev, status.st_ino)
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
            "`ulimit -v` or, on Linux, vm.overcommit_memory=2 may forbid it"
        )
    return int(address)


def _unmap(address: int, nbytes: int, track: bool) -> None:
    global _starts
    if track:
        with _lock:  # before the address can be given to another map
            _tracked.pop(address, None)
            _starts = tuple(sorted(_tracked))
    assert _libc is not None
    _libc.munmap(address, nbytes)
