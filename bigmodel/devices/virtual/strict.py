"""Launches of operations and copies on streams, with the rules of CUDA, for strict virtual accelerators.

operation               runs on the current stream of its device, now or later
copy, blocking          runs on the current stream, and the host waits for all work of that stream
copy from pinned memory, non-blocking         the host goes on: it must not write to the source before it has waited
copy from pageable memory, non-blocking       the source is copied before the call returns, after earlier work of
                                              the stream: CUDA may wait for that, so the host knows no more than before
copy to the host, non-blocking                the target holds garbage until the host has waited
copy between devices    runs on the current stream of the source, in order with that of the destination
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .host_copies import Arrival, arriving_in, check_written, delayed_copy, is_dense, late_arrival, run_arrived, watch
from .pinned import pinned_memory
from .races import Access, History, Range, detector
from .roles import rows_read, tensors_in
from .streams import count_wait, current_stream, is_compute_late
from .traits import Traits


def launch(
    traits: Traits,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    held: Sequence[Any],
    tensors: Mapping[int, Tensor],
    index: int | None,
) -> Access | None:
    """Check the accesses of an operation that is about to run on the current stream of device `index`.

    The detector's lock is held, by whoever queues the operation under the same hold.

    Args:
        traits: What is known of the operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        held: `args` with the host's tensors in the place of virtual ones.
        tensors: All virtual tensors among the arguments, by any key.
        index: The device; None if no tensor is on any.

    Returns:
        What it accesses; None if that is nothing.

    Raises:
        RaceError: An access is not ordered after a conflicting one.
    """
    roles = traits.roles
    if index is None or roles is None:
        return None
    stream = current_stream(index)
    gathered = traits.gathered
    if (gathered is not None or not is_compute_late()) and stream.has_delayed():
        stream.catch_up()
    reads: list[Range] = []
    writes: list[Range] = []
    if traits.only_reads:
        for tensor in tensors.values():
            _add_range(tensor, reads)
        return detector.launch(stream, traits.func, reads)
    for position, value in enumerate(args):
        if position in roles.positions:
            _add_ranges(value, writes)
        elif position == gathered:
            _add_rows(value, rows_read(traits.func, held), reads)
        elif roles.reads:
            _add_ranges(value, reads)
    for name, value in kwargs.items():
        if name in roles.names:
            _add_ranges(value, writes)
        elif roles.reads:
            _add_ranges(value, reads)
    return detector.launch(stream, traits.func, reads, writes)


def copy_to_device(
    target: Tensor | None, source: Tensor, non_blocking: bool, index: int, run: Callable[[], Tensor]
) -> Tensor:
    """Copy from the host to device `index`; return what holds the elements of the result.

    Args:
        target: The tensor that is written to; None: a new one.
        source: The tensor on the host.
        non_blocking: As given to the operation.
        index: The device.
        run: Does the copy and returns its result.
    """
    with detector.lock:
        stream = current_stream(index)
        in_place = _is_read_in_place(target, source)
        arriving = arriving_in(source, stream) if in_place else []
        # What arrives without blocking does so in pinned memory, as PyTorch allocates it.
        asynchronous = non_blocking and in_place and (bool(arriving) or pinned_memory.holds(source))
        if not asynchronous:
            count_wait(copies_to_device=1)
        writes = [] if target is None else _ranges(target)
        copied = detector.launch(stream, f"copy to {stream.device}", (), writes)
        if asynchronous:
            return _asynchronous(target, source, run, stream, copied, arriving)
        stream.catch_up()
        result = run_arrived(source, arriving, run)
        if not non_blocking:
            stream.finish()
        return result


def copy_to_host(target: Tensor | None, source: Tensor, non_blocking: bool, index: int, run: Callable[[], Any]) -> Any:
    """Copy from device `index` to the host; the arguments are those of `copy_to_device`."""
    with detector.lock:
        stream = current_stream(index)
        asynchronous = non_blocking and (target is None or pinned_memory.holds(target))
        if asynchronous:
            stream.catch_up()
        else:
            count_wait(copies_to_host=1)
            stream.finish()
        if target is not None:
            check_written(target, stream)
        copied = detector.launch(stream, f"copy from {stream.device}", _ranges(source), ())
        result = run()
        if not asynchronous:
            stream.finish()
            return result
        if result.numel() and (result.is_contiguous() or _is_moved(result, source)):
            late_arrival(stream, result, result, copied)
        return result


def copy_between(
    target: Tensor | None, source: Tensor, one: int, other: int, run: Callable[[Access], Tensor]
) -> Tensor:
    """Copy from device `one` to device `other`; return what holds the elements of the result.

    Args:
        target: The tensor that is written to; None: a new one.
        source: The tensor on device `one`.
        one: The device that it is copied from.
        other: The device that it is copied to.
        run: Does the copy, or queues it on the stream of device `one`, given where it was launched.
    """
    with detector.lock:
        from_, into = current_stream(one), current_stream(other)
        from_.wait_stream(into)
        writes = [] if target is None else _ranges(target)
        what = f"copy from {from_.device} to {into.device}"
        result = run(detector.launch(from_, what, _ranges(source), writes))
        into.wait_stream(from_)
        return result


def record_stream(tensor: Tensor, stream: Any) -> None:
    """Tell the allocator that `stream` uses the memory of `tensor`: it is not used again before that has finished."""
    history = _history(tensor)
    if history is not None:
        history.users[stream.number] = stream


def _asynchronous(
    target: Any, source: Tensor, run: Callable[[], Tensor], stream: Any, copied: Any, arriving: list[Arrival]
) -> Tensor:
    """Copy pinned memory when the schedule says so, where that needs nothing but moving bytes; else at once."""
    plain = source.numel() > 0 and not (source.is_conj() or source.is_neg())
    if target is None:
        plain = plain and is_dense(source)
    else:
        held: Tensor = target.held
        plain = plain and _is_moved(held, source)
    if (stream.is_default and not is_compute_late()) or not plain:
        stream.catch_up()
        result = run_arrived(source, arriving, run)
        if source.numel():
            watch(source, copied, arriving)
        return result
    into = held if target is not None else torch.empty_like(source)
    delayed_copy(stream, into, source, copied, arriving)
    return into


def _is_read_in_place(target: Tensor | None, source: Tensor) -> bool:
    """Whether a copy to a device reads `source` itself: else PyTorch converts it on the host, to pageable memory."""
    if target is None:
        return is_dense(source)
    return target.dtype == source.dtype and (source.is_contiguous() or _is_moved(target, source))


def _is_moved(target: Tensor, source: Tensor) -> bool:
    """Whether a copy only moves bytes, as between dense tensors of equal dtype, shape and strides."""
    alike = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
    return alike and is_dense(source)


def _history(tensor: Tensor) -> History | None:
    allocation = getattr(tensor, "_allocation", None)
    return None if allocation is None else allocation.history


def _ranges(value: Any) -> list[Range]:
    """Return the bytes that the virtual tensors of one argument span."""
    found: list[Range] = []
    _add_ranges(value, found)
    return found


def _add_ranges(value: Any, found: list[Range]) -> None:
    """Add the bytes that the virtual tensors of one argument span."""
    if isinstance(value, Tensor):
        _add_range(value, found)
    elif isinstance(value, (list, tuple)):
        for tensor in tensors_in(value):
            _add_range(tensor, found)


def _add_range(tensor: Any, found: list[Range]) -> None:
    history = _history(tensor)
    if history is not None:
        begin, end = tensor.span
        if begin < end:
            found.append((history, begin, end))


def span(held: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a host tensor spans: the first, and the one after the last."""
    nbytes, size = held.nbytes, held.itemsize
    begin = int(held.storage_offset()) * size
    spanned = nbytes if not nbytes or held.is_contiguous() else _spanned(held.shape, held.stride()) * size
    return begin, begin + spanned


def _add_rows(tensor: Any, rows: list[int] | None, found: list[Range]) -> None:
    """Add the bytes of some rows of a virtual tensor; None: of all. A tensor without dimensions is its only row."""
    if rows is None or not tensor.dim():
        _add_ranges(tensor, found)
        return
    history = _history(tensor)
    if history is None or not tensor.numel():
        return
    size = tensor.element_size()
    span = _spanned(tensor.shape[1:], tensor.stride()[1:]) * size
    step = tensor.stride(0) * size
    first = tensor.storage_offset() * size
    count = tensor.shape[0]
    if span == step:  # rows that follow each other are one range: there may be thousands
        found += [(history, first + begin * step, first + end * step) for begin, end in _runs(rows, count)]
    else:
        found += [(history, first + row % count * step, first + row % count * step + span) for row in rows]


def _runs(rows: list[int], count: int) -> list[tuple[int, int]]:
    """Return the rows that follow each other: the first, and the one after the last. Negative ones are from `count`."""
    found = []
    begin = end = -1
    for row in sorted({row % count for row in rows}):
        if row != end:
            if end > begin:
                found.append((begin, end))
            begin = row
        end = row + 1
    return [*found, (begin, end)] if end > begin else found


def _spanned(shape: Any, stride: Any) -> int:
    """Return the elements from the first to the last of a tensor of this shape and these strides."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride))
