"""Results of frequent operations on tensors with the strides of their shape, without a kernel of PyTorch.

PyTorch computes shapes of elementwise operations in Python, which takes up to a millisecond for each. Of contiguous
tensors of one dtype they follow from broadcasting alone. Whatever is not as plain as that has no rule, and is left to
PyTorch; the tests hold the rules against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten


_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_NUMBERS = _FLOATING | {torch.int8, torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True)
class Result:
    """Description of a tensor that an operation returns.

    Attributes:
        viewed: position, among the tensors of the arguments, of the one that it views; None: it has memory of its own.
        returned: the operation returns that argument itself, not a view of it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    viewed: int | None
    returned: bool = False


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that a tensor of this shape is made with."""
    strides, elements = [], 1
    for size in reversed(shape):
        strides.append(elements)
        elements *= max(size, 1)
    return tuple(reversed(strides))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements, and the strides that one of its shape is made with."""
    return tensor.numel() > 0 and tensor.stride() == contiguous_strides(tuple(tensor.shape))


def _elementwise(args: tuple[Any, ...], floating: bool) -> Result | None:
    """Return the result of an operation on tensors, and on numbers that do not change their dtype."""
    shape: tuple[int, ...] = ()
    dtype = torch.float32
    first: FakeTensor | None = None
    kinds = _FLOATING if floating or any(type(value) is float for value in args) else _NUMBERS
    for value in args:
        if type(value) is int or type(value) is float:
            continue
        if type(value) is not FakeTensor or not value.dim() or not is_plain(value) or value.dtype not in kinds:
            return None
        if first is None:
            first, shape, dtype = value, tuple(value.shape), value.dtype
        elif value.fake_device != first.fake_device:
            return None
        else:
            dtype = torch.promote_types(dtype, value.dtype)
            shape = shape if value.shape == shape else _broadcast(shape, tuple(value.shape))
    if first is None or not shape:
        return None
    return Result(shape, contiguous_strides(shape), 0, dtype, _device_of(first), None)


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that two shapes are broadcast to; none if they do not fit."""
    try:
        return tuple(torch.broadcast_shapes(one, other))
    except RuntimeError:  # PyTorch's own message is more to the point
        return ()


def _arithmetic(args: tuple[Any, ...]) -> Result | None:
    return _elementwise(args, floating=False)


def _floating(args: tuple[Any, ...]) -> Result | None:
    return _elementwise(args, floating=True)


def _in_place(args: tuple[Any, ...]) -> Result | None:
    found = _elementwise(args, floating=False)
    target = args[0]
    if found is None or type(target) is not FakeTensor or (found.shape, found.dtype) != (target.shape, target.dtype):
        return None
    return Result((), (), 0, target.dtype, target.fake_device, 0, True)


def _floating_in_place(args: tuple[Any, ...]) -> Result | None:
    return _in_place(args) if args[0].is_floating_point() else None


def _whole_in_place(args: tuple[Any, ...]) -> Result | None:
    return None if args[0].is_floating_point() else _in_place(args)


def _softmax(args: tuple[Any, ...]) -> Result | None:
    return _elementwise(args[:1], floating=True) if len(args) == 2 else None


def _view(args: tuple[Any, ...]) -> Result | None:
    """Return the view of a plain tensor in another shape."""
    tensor, sizes = args
    if type(tensor) is not FakeTensor or not is_plain(tensor) or not all(type(size) is int for size in sizes):
        return None
    known = math.prod(size for size in sizes if size != -1)
    free = [place for place, size in enumerate(sizes) if size == -1]
    if len(free) > 1 or known <= 0 or tensor.numel() % known or (not free and known != tensor.numel()):
        return None
    shape = tuple(tensor.numel() // known if size == -1 else size for size in sizes)
    return Result(shape, contiguous_strides(shape), int(tensor.storage_offset()), tensor.dtype, _device_of(tensor), 0)


def _same_view(args: tuple[Any, ...]) -> Result | None:
    tensor = args[0]
    if type(tensor) is not FakeTensor or not is_plain(tensor):
        return None
    shape = tuple(tensor.shape)
    return Result(shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, _device_of(tensor), 0)


def _device_of(tensor: FakeTensor) -> torch.device:
    """Return a device that is equal to a tensor's, and not the same object."""
    return torch.device(tensor.fake_device.type, tensor.fake_device.index)


RULES: dict[Any, Callable[[tuple[Any, ...]], Result | None]] = {
    **dict.fromkeys(
        (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.neg.default), _arithmetic
    ),
    **dict.fromkeys(
        (
            aten.cos.default,
            aten.div.Tensor,
            aten.pow.Tensor_Scalar,
            aten.rsqrt.default,
            aten.sigmoid.default,
            aten.silu.default,
            aten.sin.default,
        ),
        _floating,
    ),
    **dict.fromkeys((aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor), _in_place),
    aten.div_.Tensor: _floating_in_place,
    aten._safe_softmax.default: _softmax,
    **dict.fromkeys((aten.bitwise_and_.Scalar, aten.bitwise_left_shift_.Tensor_Scalar), _whole_in_place),
    aten.bitwise_or_.Tensor: _whole_in_place,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view),
    **dict.fromkeys((aten.alias.default, aten.detach.default), _same_view),
}
"""The rule of each operation that has one: it returns the result for positional arguments on one device, and None for
those that it does not cover."""
