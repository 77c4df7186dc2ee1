"""Operations on tensors inside lists, tuples, dicts and dataclasses, within one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigmodel.devices.nested import first_tensor, iter_tensors, open_container
from bigmodel.errors import TrainError


def is_torch_tensor(tensor: Any) -> bool:
    """Whether `tensor` is one."""
    return isinstance(tensor, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether `data` is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return what `generator` yields as a sequence of the type of `obj` (list, tuple, named tuple)."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def map_members(function: Callable[[Any], Any], data: Any) -> Any:
    """Return `data` with every direct member replaced by `function(member)`; a leaf unchanged."""
    container = open_container(data)
    return data if container is None else container.rebuild([function(member) for member in container.members])


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func` to every leaf of `data` that passes `test_type`, keeping the structure.

    Args:
        func: called as func(leaf, *args, **kwargs).
        data: nested lists, tuples, named tuples, mappings and dataclasses.
        error_on_other_type: refuse other leaves instead of keeping them.

    Raises:
        TrainError: another leaf, where `error_on_other_type`.
    """

    def visit(value: Any) -> Any:
        if test_type(value):
            return func(value, *args, **kwargs)
        container = open_container(value)
        if container is not None:
            return container.rebuild([visit(member) for member in container.members])
        if value is not None and error_on_other_type:
            name = getattr(func, "__name__", repr(func))
            raise TrainError(
                f"{name} works on nested lists, tuples and dicts of tensors, not on {type(value).__name__}"
            )
        return value

    return visit(data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return `tensor` with every tensor in it, and every other object that has a `to` method, on `device`.

    Args:
        tensor: nested lists, tuples, named tuples, mappings and dataclasses.
        non_blocking: copy asynchronously from pinned memory.
        skip_keys: mapping keys whose values stay where they are.
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=non_blocking)
        if isinstance(value, (str, int, float, bytes, bool)) or value is None:
            return value
        if hasattr(value, "to"):
            return _move_by_its_own(value, device, non_blocking)
        container = open_container(value)
        if container is None:
            return value
        skips = skipped if isinstance(value, Mapping) else ()
        members = zip(container.keys, container.members)
        return container.rebuild([member if key in skips else move(member) for key, member in members])

    return move(tensor)


def _move_by_its_own(value: Any, device: Any, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:  # a `to` that takes only a device, as in older versions of BatchEncoding
        return value.to(device)


def convert_to_fp32(tensor: Any) -> Any:
    """Return `tensor` with all fp16 and bf16 tensors in it converted to float32."""

    def is_half(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    return recursively_apply(Tensor.float, tensor, test_type=is_half)


def find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor in `data`, or None where there is none with a length."""
    return next((int(tensor.shape[0]) for tensor in iter_tensors(data) if tensor.ndim > 0), None)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in `data`, or None."""
    first = first_tensor(data)
    return None if first is None else first.device


def listify(data: Any) -> Any:
    """Return `data` with every tensor as nested lists of numbers."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return `data` with every tensor cut to `tensor_slice` along its first dimension."""
    return recursively_apply(lambda tensor: tensor[tensor_slice] if tensor.ndim else tensor, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate structures of tensors of one shape: [{"a": x}, {"a": y}] -> {"a": cat([x, y])}.

    Raises TrainError on leaves that are not tensors.
    """
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    container = open_container(first)
    if container is not None:
        opened = [open_container(part) for part in data]
        members = [dict(zip(each.keys, each.members)) for each in opened if each is not None]
        return container.rebuild([concatenate([part[key] for part in members], dim) for key in container.keys])
    raise TrainError(f"concatenate works on nested lists, tuples and dicts of tensors, not on {type(first).__name__}")
