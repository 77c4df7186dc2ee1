"""AcceleratedOptimizer: steps when an accumulation window closes."""

from __future__ import annotations

import pickle

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from bigmodel.train import AcceleratedOptimizer, Accelerator, GradientState


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
