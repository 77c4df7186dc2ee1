"""Operations on tensors inside lists, tuples, dicts and dataclasses, within one process."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigmodel.errors import TrainError


def is_torch_tensor(value: Any) -> bool:
    """Whether `value` is a tensor."""
    return isinstance(value, Tensor)


def is_namedtuple(value: Any) -> bool:
    """Whether `value` is an instance of a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_asdict")


def honor_type(obj: Any, items: Iterable[Any]) -> Any:
    """Return `items` as a sequence of the type of `obj` (list, tuple, named tuple)."""
    return type(obj)(*items) if is_namedtuple(obj) else type(obj)(items)


def rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return `items` as a mapping of the type of `original`."""
    if type(original) is dict:
        return items
    if isinstance(original, defaultdict):
        return defaultdict(original.default_factory, items)
    return type(original)(items)  # type: ignore[call-arg]


def rebuild_dataclass(original: Any, values: dict[str, Any]) -> Any:
    """Return a copy of a dataclass instance with these fields; its `__init__` is not run."""
    rebuilt = object.__new__(type(original))
    state = getattr(original, "__dict__", None)
    if state is not None:
        rebuilt.__dict__.update(state)
    for name, value in values.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def map_structure(function: Callable[[Any], Any], data: Any) -> Any | None:
    """Apply `function` to the members of a list, tuple, mapping or dataclass; None for anything else."""
    if isinstance(data, (list, tuple)):
        return honor_type(data, [function(item) for item in data])
    if isinstance(data, Mapping):
        return rebuild_mapping(data, {key: function(value) for key, value in data.items()})
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = dataclasses.fields(data)
        values = {item.name: function(getattr(data, item.name)) for item in fields if hasattr(data, item.name)}
        return rebuild_dataclass(data, values)
    return None


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
        mapped = map_structure(visit, value)
        if mapped is None and value is not None and error_on_other_type:
            name = getattr(func, "__name__", repr(func))
            raise TrainError(
                f"{name} works on nested lists, tuples and dicts of tensors, not on {type(value).__name__}"
            )
        return value if mapped is None else mapped

    return visit(data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return `tensor`, with every tensor in it (and everything else that has `.to`) on `device`.

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
        if skipped and isinstance(value, Mapping):
            return rebuild_mapping(value, {key: item if key in skipped else move(item) for key, item in value.items()})
        mapped = map_structure(move, value)
        return value if mapped is None else mapped

    return move(tensor)


def _move_by_its_own(value: Any, device: Any, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:  # a `.to` that takes only a device, like BatchEncoding's of old
        return value.to(device)


def convert_to_fp32(tensor: Any) -> Any:
    """Return `tensor` with the fp16 and bf16 tensors in it as float32."""

    def is_half(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    return recursively_apply(Tensor.float, tensor, test_type=is_half)


def find_tensors(data: Any) -> Iterable[Tensor]:
    """Yield the tensors in `data`, in order."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from find_tensors(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from find_tensors(getattr(data, field.name, None))


def find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor in `data`, or None where there is none with a length."""
    return next((int(tensor.shape[0]) for tensor in find_tensors(data) if tensor.ndim > 0), None)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in `data`, or None."""
    return next((tensor.device for tensor in find_tensors(data)), None)


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
    if isinstance(first, (list, tuple)):
        return honor_type(first, [concatenate([part[i] for part in data], dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: concatenate([part[key] for part in data], dim) for key in first})
    raise TrainError(f"concatenate works on nested lists, tuples and dicts of tensors, not on {type(first).__name__}")
