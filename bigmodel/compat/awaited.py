"""Tensors that an earlier stage of a pipeline computes: their shape is known here, their values once received.

A stage runs the model's own forward from its beginning. What earlier layers return is such a tensor: operations on it
give further ones, computed for their shapes alone. It becomes an ordinary tensor when its values arrive. Whatever reads
values that never arrive is an error, so no result is ever made of missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Awaited(torch.Tensor):
    """A tensor without values, until `value` is set.

    Args:
        shape: A fake tensor of the same shape, dtype and device.
    """

    shape_only: torch.Tensor
    value: torch.Tensor | None

    @staticmethod
    def __new__(cls, shape_only: torch.Tensor) -> Awaited:
        made: Awaited = torch.Tensor._make_wrapper_subclass(
            cls,
            shape_only.shape,
            strides=shape_only.stride(),
            storage_offset=shape_only.storage_offset(),
            dtype=shape_only.dtype,
            device=shape_only.device,
        )
        made.shape_only, made.value = shape_only, None
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known, (args, kwargs) = with_values((args, dict(kwargs or {})))
        if known:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Awaited, lambda tensor: tensor.shape_only, (args, kwargs))
        with _shapes_alone():
            result = func(*args, **kwargs)
        return tree_map_only(FakeTensor, Awaited, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Awaited(shape={tuple(self.shape)}, dtype={self.dtype}, received={self.value is not None})"


def with_values(data: Any) -> tuple[bool, Any]:
    """Return whether every tensor in `data` has its values, and `data` with those that have arrived."""
    data = tree_map_only(Awaited, lambda tensor: tensor if tensor.value is None else tensor.value, data)
    return not any(isinstance(leaf, Awaited) for leaf in tree_leaves(data)), data


@contextmanager
def weights_awaited(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the body the module computes shapes alone: its parameters and buffers are awaited tensors on `device`."""
    kept = [(each, each._parameters, each._buffers) for each in module.modules()]
    try:
        for each, parameters, buffers in kept:
            each.__dict__["_parameters"] = _awaited(parameters, device)
            each.__dict__["_buffers"] = _awaited(buffers, device)
        yield
    finally:
        for each, parameters, buffers in kept:
            each.__dict__["_parameters"], each.__dict__["_buffers"] = parameters, buffers


def _awaited(tensors: Mapping[str, torch.Tensor | None], device: torch.device) -> dict[str, Awaited | None]:
    with _shapes_alone():
        return {
            name: None
            if tensor is None
            else Awaited(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device))
            for name, tensor in tensors.items()
        }


@cache
def _shapes_alone() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)
