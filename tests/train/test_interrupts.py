"""Ctrl-C at any moment of an optimizer's step: it has been made, or it has not begun."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from torch import nn

from bigmodel.train import AcceleratedOptimizer, Accelerator
from bigmodel.train.interrupts import DeferredInterrupt


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """What a shell starts in the background inherits that Ctrl-C is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def interrupted_at(number: int, work: Callable[[], object]) -> bool:
    """Do `work`, with a Ctrl-C at one of its calls or returns; whether there were so many of them."""
    left, over = number, False

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= not over
        if left == -1 and not over:
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        over = True
        sys.setprofile(None)
    assert left >= 0, "the Ctrl-C was lost"
    return False


def prepared() -> tuple[nn.Module, AcceleratedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = Accelerator().prepare(torch.optim.Adam(model.parameters(), foreach=False))
    model(torch.ones(1, 4)).sum().backward()
    return model, optimizer


def numbers(model: nn.Module, optimizer: AcceleratedOptimizer) -> list[float]:
    """All weights, and what Adam keeps of each."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [number for tensor in (*model.parameters(), *kept) for number in tensor.flatten().tolist()]


def test_an_optimizer_s_step_is_whole() -> None:
    model, optimizer = prepared()
    untouched = numbers(model, optimizer)
    optimizer.step()
    stepped = numbers(model, optimizer)
    seen, number, interrupted = [], 0, True
    while interrupted:
        model, optimizer = prepared()
        interrupted = interrupted_at(number, optimizer.step)
        seen.append(numbers(model, optimizer))
        assert seen[-1] in (untouched, stepped), number
        number += 7 if number > 20 else 1  # Adam alone makes hundreds of calls
    assert untouched in seen
    assert number > 100


def test_the_second_interrupt_comes_at_once() -> None:
    reached = 0
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
        reached = 1
        signal.raise_signal(signal.SIGINT)
        reached = 2
    assert reached == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_s_own_handler_is_left_alone() -> None:
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with DeferredInterrupt():
            signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_have_no_signals() -> None:
    entered: list[bool] = []

    def work() -> None:
        with DeferredInterrupt():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


def test_an_error_in_the_body_is_the_one_that_is_seen() -> None:
    with pytest.raises(ValueError, match="broken"), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("broken")
