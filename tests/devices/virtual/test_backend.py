"""`torch.virtual` answers to the names that `torch.cuda` has for the same things."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.devices import free_memory_bytes, memory_allocated, release_cached_memory, virtual
from bigmodel.devices.virtual.backend import index_of, register


@pytest.fixture
def module(accelerators: None) -> Any:
    return torch.get_device_module("virtual")


def test_the_backend_counts_the_accelerators_that_are_enabled(module: Any) -> None:
    assert (module.is_available(), module.device_count(), module.current_device()) == (True, 2, 0)
    virtual.disable()
    assert (module.is_available(), module.device_count()) == (False, 0)


def test_bytes_of_tensors_and_their_peak_are_counted_for_each_device(module: Any) -> None:
    held = torch.zeros(100, device="virtual:1")
    assert (module.memory_allocated(0), module.memory_allocated(1)) == (0, held.nbytes)
    del held
    assert (module.memory_allocated("virtual:1"), module.max_memory_allocated(torch.device("virtual:1"))) == (0, 400)
    module.reset_peak_memory_stats(1)
    assert module.max_memory_allocated(1) == 0


def test_free_memory_is_what_the_capacity_leaves(module: Any) -> None:
    virtual.configure(0, capacity=1000)
    held = torch.zeros(100, device="virtual:0")
    assert module.mem_get_info(0) == (600, 1000)
    assert module.mem_get_info(1) == (2**40, 2**40)
    del held


def test_a_device_is_named_by_number_text_or_itself_and_the_first_one_by_nothing(module: Any) -> None:
    assert [index_of(name) for name in (None, 1, "virtual:1", "virtual", torch.device("virtual:1"))] == [0, 1, 1, 0, 1]


def test_random_numbers_are_the_hosts(module: Any) -> None:
    torch.manual_seed(3)
    there = torch.rand(4, device="virtual:0")
    torch.manual_seed(3)
    assert torch.equal(there.cpu(), torch.rand(4))


def test_generic_code_may_ask_for_what_needs_no_doing(module: Any) -> None:
    before = module.memory_allocated(0)
    module.set_device(1)
    module.synchronize()
    module.empty_cache()
    assert (module.is_initialized(), module.current_device(), module.memory_allocated(0)) == (True, 0, before)


def test_registering_again_changes_nothing(module: Any) -> None:
    register()
    assert torch.get_device_module("virtual") is module


def test_cached_memory_is_reserved_free_and_given_back() -> None:
    virtual.enable(count=1, capacity="64MiB", caching=virtual.Caching(context=2**20, workspace=2**23))
    try:
        module = torch.get_device_module("virtual")
        matrix = torch.ones(64, 64, device="virtual:0")
        assert (memory_allocated(0), module.memory_reserved(0)) == (64 * 64 * 4, 2 * 2**20)
        for _ in range(2):
            matrix @ matrix
        assert memory_allocated(0) == 64 * 64 * 4 + 2**23, "the product's workspace stays"
        assert module.memory_stats(0)["requested_bytes.all.current"] == memory_allocated(0)
        assert free_memory_bytes(0) == 2**26 - 2**20 - memory_allocated(0)
        del matrix
        release_cached_memory()
        assert module.memory_reserved(0) == 20 * 2**20
        assert module.max_memory_reserved(0) == 22 * 2**20
    finally:
        virtual.disable()
