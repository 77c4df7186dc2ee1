"""Mapped blocks: weights that are computed with in place, in memory-mapped files."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from ...checkpoint import is_untouched, mapped_region, release
from ...devices import HOST
from ...errors import CheckpointFormatError
from ..transfer.files import SourceFile, SourceFiles
from ..transfer.page_cache import is_page_cached
from ..weights.block import Registry


@dataclass(frozen=True, eq=False)
class Owner:
    """One place where the model refers to a mapped tensor. What is put there later is followed.

    Attributes:
        registry: A module's own ``_parameters`` or ``_buffers``.
        key: The name in it.
        is_buffer: A forward may write to it.
        is_sparse: A forward uses only some of its rows, so that bringing all of it in would not pay.
    """

    registry: Registry
    key: str
    is_buffer: bool = False
    is_sparse: bool = False

    def mapped(self) -> torch.Tensor | None:
        """Return the tensor, None if what is there now lies in no file."""
        tensor = self.registry.get(self.key)
        return None if tensor is None or mapped_region(tensor) is None else tensor.detach()


@dataclass(frozen=True)
class Step:
    """Adjacent bytes of mapped tensors that are paged in at once."""

    tensors: tuple[torch.Tensor, ...]
    nbytes: int


@dataclass(frozen=True)
class _Extent:
    """How far a file reaches that a block needs."""

    file: SourceFile
    end: int


class MappedBlock:
    """The mapped weights of one module, and how many of them are in memory.

    Args:
        name: The module's name in the model.
        owners: Where the model refers to them.
        files: The files they lie in, opened here to see whether they are cut short.

    Attributes:
        nbytes: Bytes of the weights that are paged in whole.
        steps: What is not paged in yet.
        running: How many steps are being paged in now (each thread pages in one at a time).
        held: Bytes that have been paged in or are being paged in.
        users: How many forwards compute with it now.
        has_sparse: Some of it is paged in by use alone.
        planned: Steps have been made since it was last dropped.
        failure: Why it could not be paged in.
    """

    def __init__(self, name: str, owners: list[Owner], files: SourceFiles) -> None:
        self.name = name
        self._owners = owners
        self._extents = _extents(owners, files)
        self.has_sparse = any(owner.is_sparse for owner in owners)
        self.nbytes = sum(tensor.nbytes for tensor in self._dense())
        self.steps: deque[Step] = deque()
        self.running = 0
        self.held = 0
        self.users = 0
        self.planned = False
        self.failure: Exception | None = None
        self._probe: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"MappedBlock({self.name!r}, {self.nbytes} bytes, {self.held} in memory)"

    @property
    def files(self) -> str:
        """Names of the files it lies in."""
        return ", ".join(str(extent.file.path) for extent in self._extents) or "a file without a name"

    @property
    def is_ready(self) -> bool:
        """Whether all of it has been paged in."""
        return self.planned and not self.steps and not self.running and self.failure is None

    @property
    def may_drop(self) -> bool:
        """Whether there is anything that could be let go of now."""
        return self.held > 0 and not self.users and not self.running

    def seems_in_memory(self) -> bool:
        """Whether its first page is in memory: a hint, got in about a microsecond, that the others are, too."""
        return self._probe is None or is_page_cached(self._probe.data_ptr())

    def check_files(self) -> None:
        """Raise CheckpointFormatError if a file has become shorter than the weights in it need: touching a page
        that is not there any more would end the process."""
        for extent in self._extents:
            size = extent.file.size()
            if size < extent.end:
                raise CheckpointFormatError(
                    f"{extent.file.path}: is {size} bytes long, but {self.name!r} needs its bytes up to {extent.end}: "
                    "it was cut short while in use; copy or download it again"
                )

    def plan(self, step_bytes: int) -> None:
        """Make the steps, of at most `step_bytes` each, that page all of it in."""
        dense = self._dense()
        self._probe = dense[0] if dense else None
        self.steps = deque(_steps(dense, step_bytes))
        self.held, self.planned, self.failure = 0, True, None

    def forget(self) -> None:
        """Assume that nothing of it is in memory."""
        self.steps.clear()
        self.held, self.planned = 0, False

    def drop(self) -> int:
        """Let go of its memory, except for weights that were written to; return how many bytes that were.

        A page that was written to exists in memory only. Buffers are kept for the same reason: a forward in another
        thread may write one at this very moment.
        """
        dropped = 0
        for owner in self._owners:
            tensor = None if owner.is_buffer else owner.mapped()
            if tensor is not None and is_untouched(tensor):
                release(tensor)
                dropped += 0 if owner.is_sparse else tensor.nbytes
        self.forget()
        return dropped

    def _dense(self) -> list[torch.Tensor]:
        """Return the tensors that are used whole, each once, in the order of their addresses."""
        found = {}
        for owner in self._owners:
            tensor = None if owner.is_sparse else owner.mapped()
            if tensor is not None:
                found[tensor.data_ptr()] = tensor
        return [found[address] for address in sorted(found)]


def _extents(owners: list[Owner], files: SourceFiles) -> list[_Extent]:
    ends: dict[SourceFile, int] = {}
    for owner in owners:
        region = mapped_region(owner.registry[owner.key])
        file = None if region is None else files.get(region)
        if region is not None and file is not None:
            ends[file] = max(ends.get(file, 0), region.offset + region.nbytes)
    return [_Extent(file, end) for file, end in ends.items()]


def _steps(tensors: list[torch.Tensor], step_bytes: int) -> list[Step]:
    """Cut tensors, in the order of their addresses, into steps of at most `step_bytes`."""
    steps: list[Step] = []
    parts: list[torch.Tensor] = []
    room = step_bytes
    for tensor in tensors:
        flat, start = _flat(tensor), 0
        while start < flat.numel():
            part = flat[start : start + room]
            parts.append(part)
            start, room = start + part.numel(), room - part.numel()
            if room == 0:
                steps.append(Step(tuple(parts), step_bytes))
                parts, room = [], step_bytes
    if parts:
        steps.append(Step(tuple(parts), step_bytes - room))
    return steps


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the first element of `tensor` to its last."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=HOST)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (span * size,))  # type: ignore[call-overload]
