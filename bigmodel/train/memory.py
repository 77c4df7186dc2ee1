"""Giving memory back, and finding a batch size that fits."""

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
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's word for a workspace that did not fit
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def release_memory(*objects: Any) -> list[None]:
    """Forget objects, collect garbage and empty the device's cache.

    Returns:
        One None for each object: `model, optimizer = release_memory(model, optimizer)`.
    """
    result = [None for _ in objects]
    del objects
    gc.collect()
    release_cached_memory()
    return result


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached memory of the accelerators back to the system."""
    if garbage_collection:
        gc.collect()
    release_cached_memory()


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(sign in str(exception) for sign in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function so that it is tried with smaller and smaller batches until memory suffices.

    Args:
        function: takes the batch size as its first argument, which callers leave out.
        starting_batch_size: the first size tried.
        reduce_batch_size_fn: called without arguments, returns the next size; 0.9 of the last by default.

    Raises:
        TypeError: `function` has no argument for the batch size, or a caller gave one.
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

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind_partial(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"the batch size ({names[0]}) is given to {function.__name__} by its decorator, leave it out: {error}"
            ) from None
        batch_size = tried = starting_batch_size
        while batch_size > 0:
            release_cached_memory()
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside of `except`, so that the frames that held the memory are gone.
            tried = batch_size
            smaller = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(batch_size * 0.9)
            logger.info("a batch of %d does not fit; trying %d", batch_size, smaller)
            batch_size = smaller
        raise TrainError(f"no batch size fits: memory ran out even with a batch of {tried}")

    return run
