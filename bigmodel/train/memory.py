"""Releasing memory, and finding a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from bigmodel.devices import release_cached_memory
from bigmodel.errors import TrainError

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error if a workspace does not fit
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def release_memory(*objects: Any) -> list[None]:
    """Drop references to objects, collect garbage and empty the device's cache.

    Returns:
        One None for each object: `model, optimizer = release_memory(model, optimizer)`.
    """
    result = [None for _ in objects]
    del objects
    gc.collect()
    release_cached_memory()
    return result


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached memory of the accelerators to the system."""
    if garbage_collection:
        gc.collect()
    release_cached_memory()


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an exception reports that memory ran out."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(sign in str(exception) for sign in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function so that it is retried with smaller batches until memory suffices.

    The next call begins with the size that sufficed.

    Args:
        function: takes the batch size as its first argument, which callers leave out.
        starting_batch_size: the first batch size.
        reduce_batch_size_fn: returns the next batch size; by default 0.9 times the last.

    Raises:
        TypeError: `function` has no argument for the batch size, or a caller passed one.
        TrainError: not even a batch of one fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    signature = inspect.signature(function)
    names = list(signature.parameters)
    if not names:
        raise TypeError(f"{function.__name__} must take the batch size as its first argument")

    first = starting_batch_size

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        try:
            signature.bind_partial(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"the decorator passes the batch size ({names[0]}) to {function.__name__}, leave it out: {error}"
            ) from None
        batch_size = tried = first
        while batch_size > 0:
            release_cached_memory()
            try:
                result = function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            else:
                first = batch_size
                return result
            # Outside of `except`, so that the frames of the exception, which refer to tensors, are released.
            tried = batch_size
            smaller = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(batch_size * 0.9)
            logger.info("a batch of %d does not fit; trying %d", batch_size, smaller)
            batch_size = smaller
        raise TrainError(f"no batch size fits: memory ran out even with a batch of {tried}")

    return run
