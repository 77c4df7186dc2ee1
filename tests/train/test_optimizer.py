"""AcceleratedOptimizer: steps at the end of an accumulation window, atomic under Ctrl-C."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from bigmodel.train import AcceleratedOptimizer, Accelerator, GradientState
from bigmodel.train.optimizer import DeferredInterrupt


def prepared() -> tuple[nn.Module, AcceleratedOptimizer]:
    model = nn.Linear(2, 1)
    optimizer = Accelerator().prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(1, 2)).sum().backward()
    return model, optimizer


def test_nothing_happens_inside_a_window() -> None:
    model, optimizer = prepared()
    before = model.weight.detach().clone()
    GradientState().sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    GradientState().sync_gradients = True
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert not optimizer.step_was_skipped


def test_it_is_an_optimizer_with_the_state_of_the_one_inside() -> None:
    _, optimizer = prepared()
    bare = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is bare.param_groups
    assert optimizer.defaults is bare.defaults
    optimizer.step()
    assert optimizer.state is bare.state
    assert optimizer.state_dict()["param_groups"] == bare.state_dict()["param_groups"]
    optimizer.load_state_dict(bare.state_dict())
    optimizer.param_groups = optimizer.param_groups
    optimizer.state = optimizer.state
    optimizer.defaults = optimizer.defaults


def test_a_scheduler_can_be_made_for_it() -> None:
    _, optimizer = prepared()
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05


def test_a_closure_is_passed_on() -> None:
    _, optimizer = prepared()
    calls = []
    optimizer.step(lambda: calls.append(1))
    assert calls == [1]


def test_a_group_of_parameters_can_be_added() -> None:
    _, optimizer = prepared()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optimizer.param_groups) == 2


def test_hooks_of_the_optimizer_work() -> None:
    _, optimizer = prepared()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]


def test_schedule_free_optimizers_are_switched() -> None:
    class ScheduleFree(torch.optim.SGD):
        mode = "none"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    bare = ScheduleFree([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = Accelerator().prepare(bare)
    optimizer.train()
    assert bare.mode == "train"
    optimizer.eval()
    assert bare.mode == "eval"
    prepared()[1].eval()


def test_it_can_be_pickled() -> None:
    _, optimizer = prepared()
    optimizer.step()
    copy = pickle.loads(pickle.dumps(optimizer))
    assert copy.gradient_state.num_steps == 1
    assert copy.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


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


def with_adam() -> tuple[nn.Module, AcceleratedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = Accelerator().prepare(torch.optim.Adam(model.parameters(), foreach=False))
    model(torch.ones(1, 4)).sum().backward()
    return model, optimizer


def numbers(model: nn.Module, optimizer: AcceleratedOptimizer) -> list[float]:
    """All weights, and what Adam keeps of each."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [number for tensor in (*model.parameters(), *kept) for number in tensor.flatten().tolist()]


@pytest.mark.slow
def test_an_optimizer_s_step_is_whole() -> None:
    model, optimizer = with_adam()
    untouched = numbers(model, optimizer)
    optimizer.step()
    stepped = numbers(model, optimizer)
    seen, number, interrupted = [], 0, True
    while interrupted:
        model, optimizer = with_adam()
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
