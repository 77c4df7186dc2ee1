"""Strict devices compute late where this is asked for: the same bits, which the host finds when it has waited."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bigmodel.devices import virtual
from bigmodel.devices.pinned import empty_host
from bigmodel.devices.virtual import host_copies, streams
from bigmodel.devices.virtual import late as late_operations
from bigmodel.devices.virtual.host_copies import GARBAGE
from bigmodel.devices.virtual.races import detector
from bigmodel.devices.virtual.streams import current_stream

device = torch.device("virtual", 0)


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    enable(None)
    yield
    virtual.disable()


def enable(seed: int | None, late_compute: bool = True, **options: Any) -> None:
    virtual.enable(count=2, strict=True, seed=seed, late_compute=late_compute, **options)


def synchronize() -> None:
    torch.get_device_module("virtual").synchronize()


def is_computed(tensor: Tensor) -> bool:
    """Whether a strict device holds the elements of `tensor` now, looked up without launching anything."""
    held: Tensor = tensor.held  # type: ignore[attr-defined]
    return not held.reshape(-1).view(torch.uint8).eq(GARBAGE).all()


def test_an_operation_is_computed_when_the_host_waits_for_it() -> None:
    x = torch.arange(8.0, device=device)
    y = (x + 1) * 2
    assert not is_computed(y)
    assert y.tolist() == [2.0 * (each + 1) for each in range(8)]
    assert is_computed(y)


def test_what_writes_into_a_tensor_is_queued_too() -> None:
    x = torch.zeros(8, device=device)
    synchronize()
    x.add_(1)
    x[2:4].mul_(3)
    torch._foreach_add_([x], 1.0)
    assert x.held.eq(0).all()  # type: ignore[attr-defined]
    assert x.tolist() == [2.0, 2.0, 4.0, 4.0, 2.0, 2.0, 2.0, 2.0]


def test_another_stream_waits_for_it_by_an_event() -> None:
    side = virtual.Stream(device)
    x = torch.ones(8, device=device) * 3
    x.record_stream(side)
    side.wait_stream(virtual.current_stream(device))
    with virtual.stream(side):
        y = x + 1
        assert not is_computed(x)
        assert y.tolist() == [4.0] * 8
    assert is_computed(x)


def test_an_operation_that_fails_is_reported_by_a_later_wait() -> None:
    table, rows = torch.ones(4, 2, device=device), torch.tensor([9], device=device)
    nn.functional.embedding(rows + 0, table)
    with pytest.raises(RuntimeError, match=r"after it had been launched: aten.embedding.*test_late.py:\d+"):
        synchronize()


def test_numbers_of_the_host_are_those_at_the_launch() -> None:
    x, number = torch.ones(8, device=device), torch.tensor(2.0)
    y = x * number
    number.fill_(5)
    assert y.tolist() == [2.0] * 8


def test_shapes_that_depend_on_elements_are_right() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 0.0], device=device) * 2
    assert x.nonzero().shape == (2, 1)
    assert x[x > 0].tolist() == [2.0, 4.0]
    assert torch.unique(x).tolist() == [0.0, 2.0, 4.0]
    assert x[torch.tensor([1, 2], device=device)].tolist() == [2.0, 4.0]


def test_random_numbers_are_drawn_in_the_order_of_launches() -> None:
    def drawn(where: Any) -> Tensor:
        torch.manual_seed(0)
        x = torch.zeros(8, device=where)
        y = nn.functional.dropout(x + 1) + torch.rand_like(x)
        return (y + torch.zeros(8, device=where).uniform_()).cpu()

    assert torch.equal(drawn(device), drawn("cpu"))


def test_modes_of_the_wait_are_not_those_of_the_launch() -> None:
    x = torch.randn(8, 8, device=device)
    y = x @ x
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        synchronize()
    assert torch.equal(y.cpu(), x.cpu() @ x.cpu())


def test_memory_may_be_freed_while_queued_operations_read_it() -> None:
    x = torch.ones(8, device=device)
    y = x + 1
    del x
    assert y.tolist() == [2.0] * 8


def test_freed_memory_is_poisoned_after_the_work_before() -> None:
    x = torch.ones(8, device=device)
    held = x.held  # type: ignore[attr-defined]
    synchronize()
    y = x + 1
    del x
    assert held.eq(1).all()
    assert y.tolist() == [2.0] * 8
    assert held.isnan().all()


def test_what_is_pickled_or_resized_has_been_computed() -> None:
    x = torch.ones(8, device=device) + 1
    assert pickle.loads(pickle.dumps(x)).tolist() == [2.0] * 8
    y = torch.ones(8, device=device) + 1
    assert y.t_().resize_(2, 4).tolist() == [[2.0] * 4] * 2
    z = torch.ones(8, device=device) + 1
    assert copy.deepcopy(z).tolist() == [2.0] * 8


@pytest.mark.parametrize(
    "finish",
    [lambda x: x.to(torch.complex64) * 2, lambda x: x.set_(torch.ones(8, device=device)), lambda x: x.tolist()],
)
def test_queued_work_is_done_by_one_thread_at_a_time(finish: Callable[[Tensor], object]) -> None:
    x = torch.ones(8, device=device) + 1
    owned: list[bool] = []
    current_stream(0).delay(lambda: owned.append(detector.lock._is_owned()))
    assert not owned
    finish(x)
    assert owned == [True]


def test_memory_is_counted_at_the_launch() -> None:
    enable(None, capacity=[1024, None])
    x = torch.ones(128, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([x, x])


def beside(device: torch.device = device) -> virtual.Stream:
    """Return a stream that waits for all work so far."""
    side = virtual.Stream(device)
    side.wait_stream(virtual.current_stream(device))
    return side


def copied_to_host(values: Tensor, side: virtual.Stream) -> Tensor:
    """Copy to the host on a stream of its own, without waiting."""
    values.record_stream(side)
    with virtual.stream(side):
        return values.to("cpu", non_blocking=True)


AT_LAUNCH: dict[str, Callable[[Tensor], object]] = {
    "random": torch.rand_like,
    "gather": lambda x: x[x.argmax(-1)],
    "metadata": lambda x: (x + 1).t_(),
    "copy": lambda x: x.to("cpu", non_blocking=True),
}


@pytest.mark.parametrize("what", sorted(AT_LAUNCH))
def test_work_that_is_done_at_its_launch_does_none_of_another_stream(what: str) -> None:
    x, y, values = torch.ones(4, 4, device=device), torch.ones(8, device=device), torch.full((8,), 3.0, device=device)
    synchronize()
    side = beside()
    y.record_stream(side)
    with virtual.stream(side):
        z = y * 2
    arrived = copied_to_host(values, beside())
    AT_LAUNCH[what](x)
    x.tolist()
    assert not is_computed(z)
    assert not arrived.eq(3).any()
    side.synchronize()


@pytest.mark.parametrize("what", sorted(AT_LAUNCH))
def test_copies_to_the_host_that_a_stream_waits_for_arrive_when_the_host_waits_for_it(what: str) -> None:
    x, values = torch.ones(4, 4, device=device), torch.full((8,), 3.0, device=device)
    side = beside()
    arrived = copied_to_host(values, side)
    virtual.current_stream(device).wait_stream(side)
    AT_LAUNCH[what](x)
    assert not arrived.eq(3).any()
    x.tolist()
    assert arrived.eq(3).all()


def test_a_chain_of_streams_brings_copies_to_the_host_that_waits_for_its_end() -> None:
    values = torch.full((8,), 3.0, device=device)
    first, second = beside(), beside()
    arrived = copied_to_host(values, first)
    second.wait_stream(first)
    virtual.current_stream(device).wait_stream(second)
    torch.rand_like(values)
    second.wait_stream(virtual.current_stream(device))
    assert not arrived.eq(3).any()
    second.synchronize()
    assert arrived.eq(3).all()


def test_memory_is_given_back_without_telling_the_host_of_its_users() -> None:
    values, side = torch.full((8,), 3.0, device=device), beside()
    arrived = copied_to_host(values, side)
    with virtual.stream(side):
        doubled = values * 2
    del values
    virtual.current_stream(device).synchronize()
    assert is_computed(doubled)
    assert not arrived.eq(3).any()
    side.synchronize()
    assert arrived.eq(3).all()


def test_a_copy_from_pageable_memory_tells_the_host_nothing() -> None:
    """CUDA may wait for earlier work of the stream, or not."""
    values, target = torch.full((8,), 3.0, device=device), torch.zeros(8, device=device)
    arrived = values.to("cpu", non_blocking=True)
    target.copy_(torch.ones(8), non_blocking=True)
    assert not arrived.eq(3).any()
    synchronize()
    assert arrived.eq(3).all()


def test_one_device_is_synchronised_at_a_time() -> None:
    here, there = (torch.ones(8, device=f"virtual:{index}") + 1 for index in range(2))
    torch.get_device_module("virtual").synchronize(1)
    assert is_computed(there)
    assert not is_computed(here)
    synchronize()
    assert is_computed(here)


def test_a_copy_between_devices_is_queued_and_both_go_on_in_order() -> None:
    x = torch.ones(8, device=device) + 1
    there, target = x.to("virtual:1"), torch.zeros(8, device="virtual:1")
    target.copy_(there + 1).add_(1)
    back = target.to(device)
    x.add_(1)
    assert not any(is_computed(each) for each in (x, there, back))
    assert back.tolist() == [4.0] * 8
    assert there.tolist() == [2.0] * 8
    assert x.tolist() == [3.0] * 8


def test_a_copy_between_devices_waits_for_the_work_of_the_target() -> None:
    source, target = torch.ones(8, device=device), torch.zeros(8, device="virtual:1")
    synchronize()
    before = target + 5
    target.copy_(source)
    assert before.tolist() == [5.0] * 8
    assert target.tolist() == [1.0] * 8


def test_complex_copies_come_after_the_work_before() -> None:
    x = torch.ones(8, device=device) + 1
    assert torch.view_as_complex(x.view(4, 2)).to(torch.complex128).tolist() == [2 + 2j] * 4


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, y: x @ y,
    "sum": lambda x, y: x + y.sum(0, keepdim=True),
    "transposed": lambda x, y: x.t().contiguous() + y,
    "softmax": lambda x, y: torch.softmax(x, -1) * y,
    "attention": lambda x, y: nn.functional.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None])[
        0, 0
    ],
    "in place": lambda x, y: x.clone().mul_(0.5).add_(y),
    "parts": lambda x, y: torch.cat([part * 2 for part in x.chunk(2)]) - y,
    "rows": lambda x, y: x[y.argmax(-1)],
    "where": lambda x, y: torch.where(x > y, x, y),
    "top": lambda x, y: x.sort(-1).values,
    "cast": lambda x, y: (x.bfloat16() @ y.bfloat16()).float(),
    "host": lambda x, y: x * y.mean().item(),
    "normed": lambda x, y: nn.functional.layer_norm(x, (8,)) + y,
    "numbers": lambda x, y: x + torch.arange(8, device=x.device),
}


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.one_of(st.none(), st.integers(0, 2**16)),
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8),
    with_gradients=st.booleans(),
)
def test_programs_compute_the_same_bits(seed: int | None, steps: list[str], with_gradients: bool) -> None:
    def run(late_compute: bool) -> list[Tensor]:
        enable(seed, late_compute)
        torch.manual_seed(0)
        x = torch.randn(8, 8).to(device).requires_grad_(with_gradients)
        values = [x, torch.randn(8, 8).to(device)]
        for step in steps:
            values.append(STEPS[step](values[-1], values[-2]))
        if values[-1].requires_grad:
            values[-1].square().mean().backward()
            if x.grad is not None:
                values.append(x.grad)
        return [value.detach().cpu() for value in values]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected) or (found.isnan().any() and torch.equal(found.isnan(), expected.isnan()))


def test_a_new_schedule_finds_all_work_done_and_nothing_noted() -> None:
    x, side = torch.zeros(8, device=device), virtual.Stream(device)
    side.wait_stream(current_stream(device))
    x.record_stream(side)
    with virtual.stream(side):
        x.add_(1)
    current_stream(device).wait_stream(side)
    target, staging = torch.zeros(8, device=device), empty_host(32, pin=True).view(torch.float32)
    target.copy_(staging, non_blocking=True)
    enable(None)
    assert x.held.eq(1).all()  # type: ignore[attr-defined]
    assert current_stream(device).known == detector.host == {}
    assert not host_copies._watched
    with virtual.stream(virtual.Stream(device)):
        x.add_(1)  # what was launched before is finished: nothing has to be waited for
        x.cpu()


@pytest.mark.slow
def test_a_forked_child_finds_all_work_done() -> None:
    x = torch.zeros(8, device=device)
    side = virtual.Stream(device)
    current_stream(device).wait_stream(side)
    synchronize()
    x.add_(1)
    child = os.fork()
    if child == 0:
        os._exit(7 if x.held.eq(1).all() and not current_stream(device).known else 1)  # type: ignore[attr-defined]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert x.held.eq(0).all()  # type: ignore[attr-defined]


def test_a_stream_queues_no_more_than_a_bounded_number_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_DELAYED", 3)
    x = torch.zeros(8, device=device)
    synchronize()
    for _ in range(4):
        x.add_(1)
    assert x.held.eq(4).all()  # type: ignore[attr-defined]


def test_what_fails_with_zeros_is_computed_at_its_launch_after_what_was_queued() -> None:
    x = torch.zeros(2, 2, device=device)
    synchronize()
    x.diagonal().add_(2)
    inverted, _ = torch.linalg.inv_ex(x, check_errors=True)
    assert is_computed(inverted)
    assert inverted.tolist() == [[0.5, 0.0], [0.0, 0.5]]


def test_the_metadata_of_no_more_than_a_bounded_number_of_calls_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_operations, "MOST_KNOWN", 2)
    for size in range(1, 6):
        torch.zeros(size, device=device) + 1
    assert len(late_operations._outputs) <= 2
