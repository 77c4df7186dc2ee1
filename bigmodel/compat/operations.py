"""Operations of ``accelerate.utils.operations`` that only its own code needs, and programs that are made like it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import update_wrapper, wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..train.collectives import DistributedOperationException, reduce
from ..train.nested import convert_to_fp32, recursively_apply
from ..train.state.partial import PartialState

F = TypeVar("F", bound=Callable[..., Any])

TENSOR_TYPE_TO_INT = {
    dtype: number
    for number, dtype in enumerate(
        (
            *(torch.float, torch.double, torch.half, torch.bfloat16),
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        ),
        start=1,
    )
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}

_MOST_DIMENSIONS = 64
"""Dimensions that a tensor of PyTorch may have."""


class ConvertOutputsToFp32:
    """A forward whose fp16 and bf16 outputs are cast to float32. It is not pickled.

    Args:
        model_forward: The forward.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError("a model prepared for mixed precision is not pickled: unwrap it with unwrap_model")


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose fp16 and bf16 outputs are cast to float32."""
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]
    return forward


def chained_operation(function: F) -> F:
    """Decorate an operation made of others, so that an error that `verify_operation` raises names it, too."""

    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            operation = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"{operation} failed: the error above says why") from error

    return named  # type: ignore[return-value]


def gather_tensor_shape(tensor: Tensor | None) -> tuple[Tensor, int]:
    """Return on every rank the shape, as a column of numbers, and the dtype of a tensor that one rank gives.

    Args:
        tensor: None on the other ranks. No dimension may be 0.

    Returns:
        The shape, and the dtype's number in `TENSOR_INT_TO_DTYPE`.
    """
    sent = torch.zeros(_MOST_DIMENSIONS + 1, dtype=torch.int, device=PartialState().device)
    if tensor is not None:
        numbers = [*tensor.shape, TENSOR_TYPE_TO_INT[tensor.dtype]]
        sent[: len(numbers)] = torch.tensor(numbers, dtype=torch.int)
    received = reduce(sent, reduction="sum")
    received = received[received.nonzero()]
    return received[:-1], int(received[-1])


def get_shape(data: Any) -> Any:
    """Return `data` with every tensor replaced by the list of its sizes."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether it is a tensor on an Intel GPU."""
    return isinstance(tensor, Tensor) and tensor.device.type == "xpu"
