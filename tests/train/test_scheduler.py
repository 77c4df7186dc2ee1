"""AcceleratedScheduler: in step with its optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from bigmodel.train import AcceleratedOptimizer, AcceleratedScheduler, Accelerator, GradientState


def optimizer() -> AcceleratedOptimizer:
    return Accelerator().prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))


def halving(optimizer: AcceleratedOptimizer, **options: object) -> AcceleratedScheduler:
    return AcceleratedScheduler(StepLR(optimizer.optimizer, 1, gamma=0.5), optimizer, **options)


def test_it_moves_when_the_window_closes() -> None:
    own = optimizer()
    scheduler = halving(own)
    own.step()
    GradientState().sync_gradients = False
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    GradientState().sync_gradients = True
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_it_moves_once_for_each_process_that_reads_other_data() -> None:
    for split, expected in ((False, 0.25), (True, 0.5)):
        scheduler = halving(optimizer(), data_processes=2, split_batches=split)
        scheduler.optimizers[0].step()
        scheduler.step()
        assert scheduler.get_last_lr() == [expected]


def test_it_stays_when_the_optimizer_s_step_was_skipped() -> None:
    own = optimizer()
    scheduler = halving(own)
    own._step_was_skipped = True
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


def test_a_scheduler_stepped_apart_is_passed_on() -> None:
    own = optimizer()
    scheduler = halving(own, step_with_optimizer=False, data_processes=4)
    own.step()
    GradientState().sync_gradients = False
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_schedule_with_an_end_stops_where_it_does_in_a_loop_of_one_process(processes: int) -> None:
    plain = optimizer()
    expected = OneCycleLR(plain.optimizer, 1.0, total_steps=5)
    plain.step()
    for _ in range(5):
        expected.step()
    own = optimizer()
    scheduler = AcceleratedScheduler(OneCycleLR(own.optimizer, 1.0, total_steps=5), own, data_processes=processes)
    own.step()
    for _ in range(7):
        scheduler.step()
    assert (scheduler.scheduler.last_epoch, scheduler.get_last_lr()) == (5, expected.get_last_lr())


def test_a_plateau_hears_each_metric_once() -> None:
    own = optimizer()
    scheduler = AcceleratedScheduler(ReduceLROnPlateau(own.optimizer, patience=1), own, data_processes=4)
    scheduler.step(1.0)
    scheduler.step(1.0)
    assert own.param_groups[0]["lr"] == 1.0
    scheduler.step(1.0)
    assert own.param_groups[0]["lr"] == pytest.approx(0.1)


def test_its_state_is_the_scheduler_s() -> None:
    own = optimizer()
    scheduler = halving(own)
    own.step()
    scheduler.step()
    other = halving(optimizer())
    other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == scheduler.last_epoch == 1
    assert other.get_last_lr() == [0.5]
    assert scheduler.get_lr() == [0.25]
