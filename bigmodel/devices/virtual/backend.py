"""Registers the device type ``virtual`` with PyTorch, once per process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ..native_threads import let_threads_finish
from . import streams
from .allocator import CachingAllocator
from .autocast import DTYPES, register_autocast
from .postponing import guard_hooks_of_functions
from .streams import TYPE, Event, Stream, index_of
from .tensor import VirtualTensor, board

_FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "randperm",
    "tril_indices",
    "triu_indices",
)

_lock = threading.Lock()
_libraries: tuple[torch.library.Library, ...] = ()


class BackendModule:
    """The module ``torch.virtual``; its functions have the names and meanings of those in ``torch.cuda``."""

    def is_initialized(self) -> bool:
        """Return True: the device type needs no initialisation."""
        return True

    def is_available(self) -> bool:
        """Whether any virtual accelerator is enabled."""
        return bool(board.arenas)

    def device_count(self) -> int:
        """Return the number of enabled virtual accelerators."""
        return len(board.arenas)

    def current_device(self) -> int:
        """Return the index that ``"virtual"`` without a number refers to."""
        return 0

    def set_device(self, device: object) -> None:
        """Do nothing: every operation runs on the device of its tensors."""

    Stream = Stream
    Event = Event
    stream = staticmethod(streams.stream)
    current_stream = staticmethod(streams.current_stream)
    default_stream = staticmethod(streams.default_stream)

    def has_streams(self, device: Any = 0) -> bool:
        """Whether work on `device` is queued on streams, as it is if the device is strict or has a set speed."""
        index = index_of(device)
        return index < len(board.arenas) and (board.arenas[index].strict or board.is_timed(index))

    def synchronize(self, device: object = None) -> None:
        """Wait for all work on `device`; None: on that of the current stream, and on no other."""
        streams.synchronize(device)

    def empty_cache(self) -> None:
        """Give back cached memory of all devices."""
        for arena in board.arenas:
            arena.empty_cache()

    def memory_reserved(self, device: Any = 0) -> int:
        """Return the bytes of `device` that its allocator has reserved, for tensors and cached."""
        return board.arena(index_of(device)).memory.reserved.now

    def max_memory_reserved(self, device: Any = 0) -> int:
        """Return the peak of `memory_reserved` since the last reset."""
        return board.arena(index_of(device)).memory.reserved.peak

    def set_per_process_memory_fraction(self, fraction: float, device: Any = 0) -> None:
        """Let the caching allocator of `device` reserve at most this share of its memory; without one, do nothing."""
        memory = board.arena(index_of(device)).memory
        if isinstance(memory, CachingAllocator):
            memory.limit = None if fraction >= 1 else int(fraction * self.mem_get_info(device)[1])

    def memory_stats(self, device: Any = 0) -> dict[str, int]:
        """Return bytes requested, allocated and reserved, now and at their peak."""
        memory = board.arena(index_of(device)).memory
        counters = {"requested": memory.requested, "allocated": memory.allocated, "reserved": memory.reserved}
        return {
            f"{name}_bytes.all.{when}": value
            for name, counter in counters.items()
            for when, value in (("current", counter.now), ("peak", counter.peak))
        }

    def memory_allocated(self, device: Any = 0) -> int:
        """Return the bytes of tensors on `device`."""
        return board.arena(index_of(device)).allocated

    def max_memory_allocated(self, device: Any = 0) -> int:
        """Return the peak of `memory_allocated` since the last reset."""
        return board.arena(index_of(device)).peak

    def reset_peak_memory_stats(self, device: Any = 0) -> None:
        """Reset the peak of `device` to the bytes that are allocated now."""
        board.arena(index_of(device)).reset_peak()

    def mem_get_info(self, device: Any = 0) -> tuple[int, int]:
        """Return free and total bytes of `device`; without a capacity, the total is taken as 1 TiB."""
        arena = board.arena(index_of(device))
        total = arena.capacity if arena.capacity is not None else 2**40
        return total - arena.memory.reserved.now - arena.memory.context, total

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast accepts."""
        return list(DTYPES)

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers come from the CPU's generator."""

    def _is_in_bad_fork(self) -> bool:
        return streams.is_in_bad_fork()


def register() -> None:
    """Make ``torch.device("virtual:N")`` usable. Does nothing the second time."""
    global _libraries
    with _lock:
        if _libraries:
            return
        _setup_privateuseone_for_python_backend(TYPE, backend_module=BackendModule())
        library = torch.library.Library("aten", "IMPL")
        for name in ("empty.memory_format", "empty_strided"):
            library.impl(name, _factory(_overload(name)), "PrivateUse1")
        for name in _FACTORIES:
            library.impl(name, _factory(_overload(name), is_launched=True), "PrivateUse1")
        library.impl("_efficientzerotensor", _factory(torch.ops.aten.zeros.default), "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        library.impl("_local_scalar_dense", _number, "PrivateUse1")
        others = register_autocast(library)
        guard_hooks_of_functions()
        # Gradients of virtual tensors are Python objects, which autograd's device threads release.
        atexit.register(let_threads_finish, "pt_autograd")
        _libraries = (library, others)


def _overload(name: str) -> Callable[..., torch.Tensor]:
    packet, _, overload = name.partition(".")
    result: Callable[..., torch.Tensor] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return result


def _factory(operation: Callable[..., torch.Tensor], is_launched: bool = False) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> torch.Tensor:
        if is_launched:
            board.launch(index_of(device))
        return VirtualTensor(operation(*args, device=torch.device("cpu"), **kwargs), index_of(device))

    return make


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    # Called only if autograd or a composite kernel has removed the Python dispatch key: delegate to the tensor class.
    return VirtualTensor.__torch_dispatch__(torch.ops.aten.copy_.default, (), (destination, source, non_blocking))


def _number(tensor: torch.Tensor) -> Any:
    # Called where PyTorch reads numbers in C++ without the Python dispatch key: ``torch.tensor([tensor])``.
    return VirtualTensor.__torch_dispatch__(torch.ops.aten._local_scalar_dense.default, (), (tensor,))
