"""Debug mode: compare what the processes are about to exchange, and say which one differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist

from bigmodel.errors import TrainError
from bigmodel.train.operations.nested import recursively_apply
from bigmodel.train.state.partial import PartialState

F = TypeVar("F", bound=Callable[..., Any])


class DistributedOperationException(TrainError):
    """The processes called one collective operation with tensors that do not fit together."""


def verify_operation(function: F) -> F:
    """In debug mode, compare shapes and dtypes across processes before `function(tensor, ...)` runs."""

    @wraps(function)
    def verified(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.use_distributed:
            _compare(function.__name__, tensor, state)
        return function(tensor, *args, **kwargs)

    return verified  # type: ignore[return-value]


def _compare(name: str, tensor: Any, state: PartialState) -> None:
    mine = repr(recursively_apply(lambda leaf: (list(leaf.shape), str(leaf.dtype), leaf.device.type), tensor))
    everyone: list[Any] = [None] * state.num_processes
    dist.all_gather_object(everyone, mine)
    if len(set(everyone)) > 1:
        listing = "\n".join(f"  process {rank}: {shapes}" for rank, shapes in enumerate(everyone))
        raise DistributedOperationException(
            f"{name} was called with tensors that differ between processes:\n{listing}\n"
            "Make them equal first, for example with pad_across_processes"
        )
