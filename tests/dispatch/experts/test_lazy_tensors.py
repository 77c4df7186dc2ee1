"""Experts that a function asks for one after another, or several at once, come through as few slots as there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch.experts.cache import Chosen, ExpertCache
from bigmodel.dispatch.experts.layer import ExpertLayer
from bigmodel.dispatch.experts.lazy_tensors import ExpertQueue, LazyTensor, split, wave_size

from ...accelerators import at
from .test_layer import layer


def cache_of(made: ExpertLayer, slots: int) -> ExpertCache:
    return ExpertCache(torch.device("cpu"), [made], slots)


@contextmanager
def asked(cache: ExpertCache, made: ExpertLayer, chosen: list[int]) -> Iterator[LazyTensor]:
    """Give the tensor "up" of a call that `chosen` were chosen for."""
    cache.record(made, chosen)
    with cache.use(Chosen(made, ())) as held:
        yield LazyTensor(ExpertQueue(cache, made, chosen, held), "up", cache.rows["up"])


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_each_expert_is_there_when_it_is_asked_for(slots: int) -> None:
    made = layer(experts=8)
    cache = cache_of(made, slots)
    with asked(cache, made, [0, 2, 3, 5, 7]) as up:
        assert [up[expert].unique().item() for expert in (0, 2, 3, 5, 7)] == [0, 2, 3, 5, 7]
        assert 0 < cache.in_use <= slots
    assert cache.in_use == 0


def test_an_expert_that_is_asked_for_again_comes_again() -> None:
    made = layer(experts=8)
    with asked(cache_of(made, 2), made, [0, 1, 2]) as up:
        assert [up[expert].unique().item() for expert in (2, 0, 2, 1)] == [2, 0, 2, 1]


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_several_experts_at_once_are_a_copy(slots: int) -> None:
    made = layer(experts=8)
    with asked(cache_of(made, slots), made, [1, 4, 6]) as up:
        copied = up[torch.tensor([6, 1, 1, 4])]
    assert copied[:, 0, 0].tolist() == [6, 1, 1, 4]


@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.parametrize("slots", [1, 3])
def test_several_experts_at_once_take_the_memory_of_the_copies_alone(slots: int) -> None:
    made = layer(experts=8)
    cache = ExpertCache(torch.device(at(0)), [made], slots)
    with asked(cache, made, [1, 4, 6]) as up:
        before = memory_allocated(at(0))
        reset_peak_memory(at(0))
        copied = up[torch.tensor([6, 1, 1, 4])]
        assert copied.cpu()[:, 0, 0].tolist() == [6, 1, 1, 4]
        assert max_memory_allocated(at(0)) - before == 4 * made.expert_bytes


def test_a_lazy_tensor_has_the_device_and_dtype_of_what_it_stands_for() -> None:
    made = layer()
    with asked(cache_of(made, 2), made, [0]) as up:
        assert (up.device, up.dtype) == (torch.device("cpu"), torch.float32)


def test_half_of_the_slots_is_left_for_what_comes_next_unless_all_fit() -> None:
    assert [wave_size(4, slots) for slots in (1, 2, 3, 4, 9)] == [1, 1, 1, 4, 4]
    assert split([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert split([], 2) == []
