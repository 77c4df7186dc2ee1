"""Operations that strict accelerators queue on their streams and compute later, as a GPU does, where this is asked for.

An operation is queued if what it returns has the same shapes whatever its inputs hold: these are found by computing it
once with zeros, for each operation and metadata of its inputs. Before it is computed, outputs hold garbage. Others are
computed when they are launched, after all work of their stream: operations that draw random numbers, that have outputs
of unknown shape, that change the metadata of a tensor, or that fail with zeros.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

from .host_copies import GARBAGE
from .races import Access, detector
from .roles import roles_of
from .streams import Stream, current_stream, is_compute_late

aten = torch.ops.aten

_AT_LAUNCH = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
}
"""Tags of operations that are computed when they are launched."""


class _Kind(NamedTuple):
    """What is known of an operation before its arguments are.

    Attributes:
        is_queued: Whether it may be computed late.
        touches: Whether it accesses memory at all, or changes the metadata of a tensor.
        returned: Position of the argument that it writes to and returns; None: it returns new tensors.
        returns: Whether it returns anything.
    """

    is_queued: bool
    touches: bool
    returned: int | None
    returns: bool


class _New(NamedTuple):
    """A tensor that an operation returns."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int


@cache
def _kind_of(func: OpOverload) -> _Kind:
    schema = func._schema
    touches = schema.is_mutable or roles_of(func) is not None
    written = [
        position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    tags = set(func.tags) - ({torch.Tag.dynamic_output_shape} if func is aten.index.Tensor else set())
    is_queued = not func.is_view and roles_of(func) is not None and not tags & _AT_LAUNCH
    if written:
        # In place: one argument, or lists of them. Those with `out=` may resize it, others return new tensors beside.
        plain = not any(schema.arguments[position].kwarg_only for position in written)
        is_queued = is_queued and plain and (not schema.returns or (len(written) == 1 and len(schema.returns) == 1))
    returned = written[0] if written and schema.returns else None
    return _Kind(is_queued, touches, returned, bool(schema.returns))


MOST_KNOWN = 20_000
"""How many calls of different outputs are remembered."""

_outputs: dict[Any, list[_New | None] | _New | None] = {}
"""What operations return, by operation and metadata of their arguments; None: they are computed at launch."""


def is_late(index: int | None) -> bool:
    """Whether operations on device `index` are queued."""
    return index is not None and is_compute_late()


def queue(
    func: OpOverload,
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_device: Any,
    index: int,
    launched: Access | None,
) -> Any:
    """Queue an operation on the current stream of device `index`, or compute it if it must not be late.

    Args:
        func: The operation.
        kernel: Computes it.
        args: Its arguments; tensors are those of the host that hold the elements.
        kwargs: Its keyword arguments, of the same kind.
        on_device: Holds the ids of tensors that are the device's; others are read now, as at a launch.
        index: The device.
        launched: Where it was launched.

    Returns:
        What the kernel returns; new tensors may hold garbage so far.
    """
    with detector.lock:
        stream, kind = current_stream(index), _kind_of(func)
        key = _key((func, args, kwargs)) if kind.is_queued else None
        if key is None:
            if kind.touches:
                stream.run_delayed(for_host=False)
            return kernel(*args, **kwargs)
        args, kwargs = _read_now(args, on_device), _read_now(kwargs, on_device)
        if kind.returned is not None or not kind.returns:
            _delay(stream, kernel, args, kwargs, [], launched)
            return None if kind.returned is None else args[kind.returned]
        if key not in _outputs:
            if len(_outputs) >= MOST_KNOWN:
                _outputs.clear()
            _outputs[key] = _found(kernel, args, kwargs)
        found = _outputs[key]
        if found is None:
            stream.run_delayed(for_host=False)
            return kernel(*args, **kwargs)
        made = [None if each is None else _empty(each) for each in (found if isinstance(found, list) else [found])]
        _delay(stream, kernel, args, kwargs, made, launched)
        return tuple(made) if isinstance(found, list) else made[0]


def _delay(
    stream: Stream,
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: list[Tensor | None],
    launched: Access | None,
) -> None:
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.Python, DispatchKey.PythonTLSSnapshot):  # modes that are active when it is computed
        include, exclude = include.remove(key), exclude.add(key)

    def compute() -> None:
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch._C.DisableTorchFunction():
            try:
                results = kernel(*args, **kwargs)
            except Exception as error:
                raise RuntimeError(f"an operation failed after it had been launched: {launched}: {error}") from error
            for target, result in zip(made, results if isinstance(results, (list, tuple)) else [results]):
                if target is not None:
                    target.copy_(result)

    stream.delay_compute(compute)


def _found(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    new = [
        None if each is None else _New(each.size(), each.stride(), each.dtype, each.untyped_storage().nbytes())
        for each in several
    ]
    if any(_empty(each).untyped_storage().nbytes() != each.storage_bytes for each in new if each is not None):
        return None
    return new if isinstance(results, (list, tuple)) else new[0]


def _empty(new: _New) -> Tensor:
    """Return a tensor that holds garbage."""
    made = torch.empty_strided(new.size, new.stride, dtype=new.dtype, device="cpu")
    if made.numel():
        ctypes.memset(made.data_ptr(), 0 if new.dtype == torch.bool else GARBAGE, made.untyped_storage().nbytes())
    return made


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


def _key(value: Any) -> Any:
    """Return what tells calls of different outputs apart; None if an operation must not be queued for its arguments."""
    parts = tuple(_parts(value))
    try:
        hash(parts)
    except TypeError:
        return None
    indices = value[1][1] if value[0] is aten.index.Tensor else ()
    return None if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices) else parts


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value.size(), value.stride(), value.dtype
    elif isinstance(value, (list, tuple)):
        yield type(value), len(value)
        for each in value:
            yield from _parts(each)
    elif isinstance(value, dict):
        for name in sorted(value):
            yield name
            yield from _parts(value[name])
    else:
        yield type(value), value
