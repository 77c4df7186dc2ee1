"""Operations that strict accelerators queue on their streams and compute later, as a GPU does, where this is asked for.

An operation is queued if its outputs have the same shapes for all values of its inputs: these are found by computing
it once with zeros, for each operation and metadata of its inputs. Before it is computed, outputs hold garbage. Others
are computed when they are launched, after all work of their stream: operations that draw random numbers, that have
outputs of unknown shape, that change the metadata of a tensor, or that fail with zeros.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from .host_copies import GARBAGE
from .races import Access
from .streams import Stream, current_stream, is_compute_late
from .traits import Traits

_HOST = torch.device("cpu")

Metadata = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""The size of a tensor, its strides and dtype."""


class _New(NamedTuple):
    """A tensor that an operation returns.

    Attributes:
        size: Its size.
        stride: Its strides.
        alike: An empty tensor of its dtype: one like it is made in half the time of one of a dtype.
        storage_bytes: Bytes of its storage.
        filled: The byte that it holds until it is computed.
    """

    size: torch.Size
    stride: tuple[int, ...]
    alike: Tensor
    storage_bytes: int
    filled: int


MOST_KNOWN = 20_000
"""Upper bound of the calls whose outputs are remembered."""

_outputs: dict[Any, list[_New | None] | _New | None] = {}
"""Descriptions of outputs, by operation and metadata of its arguments; None: it is computed at launch."""


def is_late(index: int | None) -> bool:
    """Whether operations on device `index` are queued."""
    return index is not None and is_compute_late()


def queue(
    traits: Traits,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    on_device: Mapping[int, Any],
    reads_host: bool,
    index: int,
    launched: Access | None,
) -> Any:
    """Queue an operation on the current stream of device `index`, or compute it if it must not be late.

    The detector's lock is held.

    Args:
        traits: What is known of the operation.
        args: Its arguments; tensors are those of the host that hold the elements.
        kwargs: Its keyword arguments, of the same kind.
        on_device: The device's tensors, by the ids of those that hold their elements; others are read now, as at a
            launch.
        reads_host: Whether there are others.
        index: The device.
        launched: Where it was launched.

    Returns:
        What the kernel returns; new tensors may hold garbage so far.
    """
    stream = current_stream(index)
    if not traits.is_queued or (traits.is_indexed and has_masks(args[1])):
        if traits.touches:
            stream.catch_up()
        return traits.kernel(*args, **kwargs)
    if reads_host:
        args, kwargs = _read_now(args, on_device), _read_now(kwargs, on_device)
    if traits.returned is not None or not traits.returns:
        _delay(stream, traits, args, kwargs, (), launched)
        return None if traits.returned is None else args[traits.returned]
    found = _known_outputs(traits, args, kwargs, on_device)
    if found is None:
        stream.catch_up()
        return traits.kernel(*args, **kwargs)
    if isinstance(found, _New):
        one = _empty(found)
        _delay(stream, traits, args, kwargs, (one,), launched)
        return one
    made = tuple([None if each is None else _empty(each) for each in found])
    _delay(stream, traits, args, kwargs, made, launched)
    return made


def _delay(
    stream: Stream,
    traits: Traits,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    made: tuple[Tensor | None, ...],
    launched: Access | None,
) -> None:
    include, exclude = _keys_at_launch()

    def compute() -> None:
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch._C.DisableTorchFunction():
            try:
                results = traits.kernel(*args, **kwargs)
            except Exception as error:
                raise RuntimeError(f"an operation failed after it had been launched: {launched}: {error}") from error
            if made:
                for target, result in zip(made, results if isinstance(results, (list, tuple)) else (results,)):
                    if target is not None:
                        target.copy_(result)

    stream.delay_compute(compute)


_keys: dict[tuple[int, int], tuple[DispatchKeySet, DispatchKeySet]] = {}


def _keys_at_launch() -> tuple[DispatchKeySet, DispatchKeySet]:
    """Return the dispatch keys that are included and excluded now, without modes: some may be active later."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    raw = include.raw_repr(), exclude.raw_repr()
    found = _keys.get(raw)
    if found is None:
        for key in (DispatchKey.Python, DispatchKey.PythonTLSSnapshot):
            include, exclude = include.remove(key), exclude.add(key)
        found = _keys[raw] = include, exclude
    return found


def _known_outputs(traits: Traits, args: Sequence[Any], kwargs: dict[str, Any], on_device: Mapping[int, Any]) -> Any:
    """Return what an operation returns for arguments of this metadata; None if it is computed at launch."""
    parts: list[Any] = [traits]
    _describe(args, on_device, parts)
    if kwargs:
        for name in sorted(kwargs):
            parts.append(name)
            _describe((kwargs[name],), on_device, parts)
    key = tuple(parts)
    try:
        return _outputs[key]
    except KeyError:
        if len(_outputs) >= MOST_KNOWN:
            _outputs.clear()
        found = _outputs[key] = _found(traits.kernel, args, kwargs)
        return found
    except TypeError:  # an argument has no hash
        return None


def _describe(values: Iterable[Any], on_device: Mapping[int, Any], parts: list[Any]) -> None:
    """Add what tells calls of different outputs apart."""
    for value in values:
        known = on_device.get(id(value))
        if known is not None:
            parts += known._metadata
        elif isinstance(value, Tensor):
            parts += (value.size(), value.stride(), value.dtype)
        elif isinstance(value, (list, tuple)):
            parts += (type(value), len(value))
            _describe(value, on_device, parts)
        else:
            parts += (type(value), value)


def has_masks(indices: Iterable[Tensor | None]) -> bool:
    """Whether how much is indexed depends on what the indices hold."""
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _found(kernel: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what an operation returns, found with zeros in the place of its tensors; None if that cannot be known."""
    zeros: list[Tensor] = []
    try:
        results = kernel(*_zeros(args, zeros), **_zeros(kwargs, zeros))
    except Exception:  # it is computed at launch, where it fails too, or not if it was because of the zeros
        return None
    several = list(results) if isinstance(results, (list, tuple)) else [results]
    if not all(each is None or isinstance(each, Tensor) for each in several):
        return None
    tensors = [each for each in several if each is not None]
    storages = [each.untyped_storage().data_ptr() for each in (*tensors, *zeros) if each.numel()]
    if len({*storages}) < len(storages) or any(each.storage_offset() for each in tensors):
        return None
    new = [None if each is None else _new(each) for each in several]
    if any(_made(each).untyped_storage().nbytes() != each.storage_bytes for each in new if each is not None):
        return None
    return new if isinstance(results, (list, tuple)) else new[0]


def _new(tensor: Tensor) -> _New:
    alike = torch.empty(0, dtype=tensor.dtype, device=_HOST)
    filled = 0 if tensor.dtype is torch.bool else GARBAGE
    return _New(tensor.size(), tensor.stride(), alike, tensor.untyped_storage().nbytes(), filled)


def _empty(new: _New) -> Tensor:
    """Return a tensor that holds garbage."""
    made = _made(new)
    if new.storage_bytes:
        ctypes.memset(made.data_ptr(), new.filled, new.storage_bytes)
    return made


def _made(new: _New) -> Tensor:
    return new.alike.new_empty_strided(new.size, new.stride)


def _zeros(value: Any, made: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        spanned = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride())) if value.numel() else 0
        zeros = torch.zeros(spanned, dtype=value.dtype, device="cpu").as_strided(value.shape, value.stride())
        made.append(zeros)
        return zeros
    if isinstance(value, (list, tuple)):
        return type(value)([_zeros(each, made) for each in value])
    if isinstance(value, dict):
        return {name: _zeros(each, made) for name, each in value.items()}
    return value


def _read_now(value: Any, on_device: Any) -> Any:
    """Return arguments in which the host's own tensors are copied: the device gets them when it is launched."""
    if isinstance(value, Tensor):
        return value if id(value) in on_device else value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)([_read_now(each, on_device) for each in value])
    if isinstance(value, dict):
        return {name: _read_now(each, on_device) for name, each in value.items()}
    return value
