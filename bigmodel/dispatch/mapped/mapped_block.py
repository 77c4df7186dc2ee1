"""Mapped blocks: weights in memory-mapped files, used in place by the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import torch

from ...checkpoint import is_untouched, mapped_region, release
from ...devices import HOST
from ...errors import CheckpointFormatError
from ..transfer.files import SourceFile, SourceFiles
from ..transfer.page_cache import is_page_cached
from ..weights.block import Registry
from ..weights.outside_use import host_value


@dataclass(frozen=True, eq=False)
class Owner:
    """One reference of the model to a mapped tensor. It is read on each use, since the user may replace the tensor.

    Attributes:
        registry: A module's own ``_parameters`` or ``_buffers``.
        key: The name in it.
        is_buffer: Whether a forward may write to it.
        is_sparse: Whether a forward uses only some of its rows, so that it is not paged in as a whole.
    """

    registry: Registry
    key: str
    is_buffer: bool = False
    is_sparse: bool = False

    def mapped(self) -> torch.Tensor | None:
        """Return the tensor; None if the present one is not in a mapped file."""
        tensor = self.registry.get(self.key)
        return None if tensor is None or mapped_region(tensor) is None else host_value(tensor)


@dataclass(frozen=True)
class PageInStep:
    """Adjacent bytes of mapped tensors that are paged in by one call, and released together.

    Attributes:
        tensors: The bytes of each tensor.
        nbytes: Their number.
        releasable: Those that can be released: not of buffers, since a forward in another thread may be writing one.
    """

    tensors: tuple[torch.Tensor, ...]
    nbytes: int
    releasable: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Extent:
    """The end, in bytes, of a block's tensors in one file."""

    file: SourceFile
    end: int


class MappedBlock:
    """The mapped weights of one module, and their state of page-in.

    Args:
        name: The module's name in the model.
        owners: The model's references to them.
        files: Their files, opened here to detect truncation.

    Attributes:
        nbytes: Bytes of the weights that are paged in as a whole.
        steps: Steps that are not paged in yet.
        running: Number of steps that are being paged in now (each thread pages in one at a time).
        paged_in: Bytes that have been paged in or are being paged in.
        users: Number of forwards that compute with it now.
        has_sparse: Whether some of its tensors are paged in only by use.
        planned: Whether steps have been made since it was last dropped.
        failure: The error of its page-in, if any.
    """

    def __init__(self, name: str, owners: list[Owner], files: SourceFiles) -> None:
        self.name = name
        self._owners = owners
        self._files = files
        self._extents = _extents(owners, files)
        self.has_sparse = any(owner.is_sparse for owner in owners)
        self.nbytes = sum(tensor.nbytes for tensor in self._dense())
        self.steps: deque[PageInStep] = deque()
        self.running = 0
        self.paged_in = 0
        self.users = 0
        self.planned = False
        self.failure: Exception | None = None
        self._probe: torch.Tensor | None = None
        self._step_bytes = 0

    def __repr__(self) -> str:
        return f"MappedBlock({self.name!r}, {self.nbytes} bytes, {self.paged_in} in memory)"

    @property
    def files(self) -> str:
        """Names of its files."""
        return ", ".join(str(extent.file.path) for extent in self._extents) or "a file without a name"

    @property
    def is_ready(self) -> bool:
        """Whether all of it has been paged in."""
        return self.planned and not self.steps and not self.running and self.failure is None

    @property
    def may_drop(self) -> bool:
        """Whether some of its memory can be released now."""
        return self.paged_in > 0 and not self.users and not self.running

    def seems_in_memory(self) -> bool:
        """Whether its first page is in memory, which suggests that the others are too. Takes about a microsecond."""
        return self._probe is None or is_page_cached(self._probe.data_ptr())

    def check_files(self) -> None:
        """Raise CheckpointFormatError if a file has been truncated: accessing a page beyond its end would terminate the
        process."""
        for extent in self._extents:
            size = extent.file.size()
            if size < extent.end:
                raise CheckpointFormatError(
                    f"{extent.file.path}: is {size} bytes long, but {self.name!r} needs its bytes up to {extent.end}: "
                    "it was cut short while in use; copy or download it again"
                )

    def plan(self, step_bytes: int) -> None:
        """Divide its page-in into steps of at most `step_bytes`."""
        dense = self._dense()
        self._probe = dense[0] if dense else None
        self._step_bytes = step_bytes
        self.steps = deque(self._all_steps(dense))
        self.paged_in, self.planned, self.failure = 0, True, None

    def forget(self) -> None:
        """Treat it as not in memory."""
        self.steps.clear()
        self.paged_in, self.planned = 0, False

    def drop(self, nbytes: int | None = None, evict: bool = False) -> int:
        """Release its memory, except for modified weights; return the number of bytes.

        A modified page exists in memory only. Buffers are not released: a forward in another thread may be writing one.

        Args:
            nbytes: Release only its last steps, with at least so many bytes. They must be paged in again, the others
                stay.
            evict: Evict the pages from the page cache, too, which keeps those that are only released.
        """
        if nbytes is not None and nbytes < self.paged_in:
            steps = self._all_steps(self._dense())
            present = steps[: len(steps) - len(self.steps)]
            if sum(step.nbytes for step in present) == self.paged_in:  # else tensors were replaced meanwhile
                return self._drop_last(present, nbytes, evict)
        dropped = 0
        for owner in self._owners:
            tensor = None if owner.is_buffer else owner.mapped()
            if tensor is not None and self._release(tensor, evict):
                dropped += 0 if owner.is_sparse else tensor.nbytes
        self.forget()
        return dropped

    def _drop_last(self, present: list[PageInStep], nbytes: int, evict: bool) -> int:
        """Release the last of the steps that are `present` until `nbytes` are."""
        dropped = 0
        while present and dropped < nbytes:
            step = present.pop()
            for tensor in step.releasable:
                self._release(tensor, evict)
            self.steps.appendleft(step)
            self.paged_in -= step.nbytes
            dropped += step.nbytes
        return dropped

    def _all_steps(self, dense: list[torch.Tensor]) -> list[PageInStep]:
        buffers = [owner.mapped() for owner in self._owners if owner.is_buffer]
        written = {buffer.data_ptr() for buffer in buffers if buffer is not None}
        return _steps(dense, self._step_bytes, written)

    def _release(self, tensor: torch.Tensor, evict: bool) -> bool:
        """Release the pages of a tensor, or evict them, unless it was modified; return whether they were released."""
        if not is_untouched(tensor):
            return False
        release(tensor)
        region = mapped_region(tensor) if evict else None
        file = None if region is None else self._files.get(region)
        if region is not None and file is not None:
            file.evict(region.offset, region.nbytes)
        return True

    def _dense(self) -> list[torch.Tensor]:
        """Return the tensors that are used as a whole, each once, in the order of their addresses."""
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


def _steps(tensors: list[torch.Tensor], step_bytes: int, written: Collection[int]) -> list[PageInStep]:
    """Divide tensors, in the order of their addresses, into steps of at most `step_bytes`.

    Args:
        written: Addresses of those that a forward may write to.
    """
    steps: list[PageInStep] = []
    parts: list[torch.Tensor] = []
    releasable: list[torch.Tensor] = []
    left = step_bytes

    def end() -> None:
        steps.append(PageInStep(tuple(parts), step_bytes - left, tuple(releasable)))
        parts.clear()
        releasable.clear()

    for tensor in tensors:
        flat, start = _flat(tensor), 0
        while start < flat.numel():
            part = flat[start : start + left]
            parts.append(part)
            if tensor.data_ptr() not in written:
                releasable.append(part)
            start, left = start + part.numel(), left - part.numel()
            if left == 0:
                end()
                left = step_bytes
    if parts:
        end()
    return steps


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the first element of `tensor` to its last."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=HOST)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (span * size,))  # type: ignore[call-overload]
