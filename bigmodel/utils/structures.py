"""Nested data: tensor shapes and dtypes without values, and small conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bigmodel.devices import parse_size
from bigmodel.train.nested import find_batch_size, recursively_apply


@dataclass(frozen=True)
class TensorInformation:
    """A tensor's shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether it is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Return `data` with every tensor replaced by its `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return uninitialised tensors for a structure that `get_data_structure` returned."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor in `data`; None if there is none."""
    return find_batch_size(data)


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge `source` into `destination`, recursively, and return it; values of `source` take precedence."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute at a dotted path: `recursive_getattr(model, "layer.weight")`."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function; of any other object, that of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def convert_bytes(size: float) -> str:
    """Return a size in bytes as accelerate writes it, in steps of 1024: 1610612736 -> "1.5 GB"."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Return the bytes of a size: "1GiB" -> 1073741824, "1GB" -> 1000000000. Raises SizeError."""
    return parse_size(size)
