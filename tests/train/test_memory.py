"""Giving memory back; finding a batch size that fits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)


def test_objects_are_forgotten() -> None:
    first, second = torch.ones(1), torch.ones(2)
    gone = weakref.ref(first)
    first, second = release_memory(first, second)
    clear_device_cache(garbage_collection=True)
    assert (first, second) == (None, None)
    assert gone() is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_a_lack_of_memory_reduces_the_batch(error: Exception, expected: bool) -> None:
    assert should_reduce_batch_size(error) is expected


def test_smaller_batches_are_tried_until_one_fits() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, extra: str) -> str:
        tried.append(batch_size)
        if batch_size > 75:
            raise torch.OutOfMemoryError("full")
        return extra

    assert train("done") == "done"
    assert tried == [100, 90, 81, 72]
    assert train("again") == "again"
    assert tried[4:] == [72], "the next call begins with the size that sufficed"


def test_the_next_size_can_be_chosen() -> None:
    sizes = iter([50, 25])

    @find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> int:
        if batch_size > 25:
            raise torch.OutOfMemoryError("full")
        return batch_size

    assert train() == 25


def test_what_a_failed_try_held_is_free_in_the_next() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=2, reduce_batch_size_fn=lambda: 1)
    def train(batch_size: int) -> bool:
        if batch_size == 2:
            big = torch.ones(10)
            held.append(weakref.ref(big))
            raise torch.OutOfMemoryError("full")
        gc.collect()
        return held[0]() is None

    assert train()


def test_other_errors_come_out() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        train()


def test_running_out_of_sizes_is_an_error() -> None:
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(TrainError, match="even with a batch of 1"):
        train()


def test_mistakes_are_named() -> None:
    @find_executable_batch_size
    def train(batch_size: int, extra: int = 0) -> None: ...

    with pytest.raises(TypeError, match="the decorator passes the batch size"):
        train(8, 0)
    with pytest.raises(TypeError, match="the decorator passes the batch size"):
        train(batch_size=8)
    with pytest.raises(TypeError, match="as its first argument"):
        find_executable_batch_size(lambda: None)


def test_a_function_may_take_any_number_of_arguments() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, *data: int, **options: int) -> object:
        return batch_size, data, options

    assert train(1, 2, 3, x=4) == (4, (1, 2, 3), {"x": 4})


def test_the_error_says_what_was_tried_last() -> None:
    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 0)
    def train(batch_size: int) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(TrainError, match="even with a batch of 8"):
        train()
