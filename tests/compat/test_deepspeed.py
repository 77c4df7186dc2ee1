"""DeepSpeed as ``accelerate.utils`` names it: wrappers of an engine and of its optimizer."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bigmodel.compat.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    GatheredParameters,
    deepspeed_required,
)
from bigmodel.train import AcceleratedOptimizer, Accelerator, DeepSpeedPlugin
from bigmodel.utils.deepspeed import DeepSpeedSchedulerWrapper
from tests.train.multiprocess import run_on_ranks
from tests.train.new_states import new_states as new_states
from tests.train.strategies.conftest import DEEPSPEED


class Recorder:
    """An engine that writes down what it is asked for."""

    def __init__(self, norm: object) -> None:
        self.asked: list[object] = []
        self.norm = norm

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.asked.append(is_boundary)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        self.asked.append(("backward", loss.item(), kwargs))

    def step(self) -> None:
        self.asked.append("step")

    def get_global_grad_norm(self) -> object:
        return self.norm


def test_an_engine_steps_at_the_end_of_a_window() -> None:
    engine = Recorder(torch.tensor(2.0))
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.backward(torch.tensor(3.0), sync_gradients=False, retain_graph=True)
    assert engine.asked == [False, ("backward", 3.0, {"retain_graph": True})]
    engine.asked.clear()
    wrapper.backward(torch.tensor(4.0))
    assert engine.asked == [True, ("backward", 4.0, {}), "step"]


@pytest.mark.parametrize("norm", [2.0, torch.tensor(2.0), None])
def test_the_norm_of_the_gradients_is_a_number(norm: object) -> None:
    found = DeepSpeedEngineWrapper(Recorder(norm)).get_global_grad_norm()
    assert not isinstance(found, torch.Tensor)
    assert found == norm


def test_an_optimizer_of_an_engine_does_nothing_by_itself() -> None:
    layer = nn.Linear(1, 1)
    inner = torch.optim.SGD(layer.parameters(), lr=0.5)
    optimizer = DeepSpeedOptimizerWrapper(inner)
    assert isinstance(optimizer, AcceleratedOptimizer)
    layer(torch.ones(1, 1)).sum().backward()
    before = layer.weight.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert (layer.weight.item(), layer.weight.grad is None) == (before, False)
    assert not optimizer.step_was_skipped
    inner.overflow = True  # type: ignore[attr-defined]
    assert optimizer.step_was_skipped


def test_what_is_set_on_it_is_set_on_the_engines() -> None:
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    optimizer = DeepSpeedOptimizerWrapper(inner)
    optimizer.param_groups = [{**inner.param_groups[0], "lr": 0.25}]
    optimizer.defaults = {"lr": 1.0}
    assert (inner.param_groups[0]["lr"], inner.defaults) == (0.25, {"lr": 1.0})
    assert optimizer.state is inner.state
    assert optimizer.state_dict()["param_groups"] == inner.state_dict()["param_groups"]


def test_a_scheduler_of_an_engine_does_not_step() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler = DeepSpeedSchedulerWrapper(inner, [optimizer])
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    with pytest.warns(UserWarning, match="get_last_lr"):
        assert scheduler.get_lr() == [0.5]
    assert scheduler.state_dict() == inner.state_dict()


def test_a_function_of_deepspeed_needs_such_a_run() -> None:
    @deepspeed_required
    def stage() -> int:
        return 3

    assert stage() == 3  # nothing says yet what the run uses
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="stage needs DeepSpeed"):
        stage()


def test_parameters_are_whole_in_other_runs() -> None:
    Accelerator(cpu=True)
    layer = nn.Linear(2, 2)
    with GatheredParameters(layer.parameters(), modifier_rank=0):
        assert layer.weight.shape == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_real_engine_accumulates_and_steps(stage: int) -> None:
    pytest.importorskip("deepspeed")
    run_on_ranks(accumulate, stage, modules=DEEPSPEED)


def accumulate(stage: int) -> None:
    """Two passes to one step of SGD on two processes: both halves of the parameters follow."""
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2)
    plugin.deepspeed_config.update(train_micro_batch_size_per_gpu=1, zero_allow_untested_optimizer=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    layer = nn.Linear(3, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    engine, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.5))
    assert (layer.weight.numel() == 0) is (stage == 3)
    with GatheredParameters(list(layer.parameters()), enabled=False):
        assert (layer.weight.numel() == 0) is (stage == 3)
    wrapper = DeepSpeedEngineWrapper(engine)
    for ends in (False, True):
        wrapper.backward(engine(torch.ones(1, 3)).sum(), sync_gradients=ends)
        with GatheredParameters(list(layer.parameters())):
            assert layer.weight.tolist() == [[1.5] * 3 if ends else [2.0] * 3]
    assert wrapper.get_global_grad_norm() == pytest.approx(3**0.5)
    assert not optimizer.step_was_skipped
    assert not DeepSpeedOptimizerWrapper(engine.optimizer).step_was_skipped


@pytest.mark.parametrize(
    ("kind", "becomes", "decays_as_adamw"),
    [
        (torch.optim.AdamW, "adam.DeepSpeedCPUAdam", True),
        (torch.optim.Adam, "adam.DeepSpeedCPUAdam", False),
        (torch.optim.SGD, "adam.DeepSpeedCPUAdam", False),
        (torch.optim.Adagrad, "adagrad.DeepSpeedCPUAdagrad", None),
    ],
)
def test_optimizers_become_those_of_the_host(
    kind: type[torch.optim.Optimizer], becomes: str, decays_as_adamw: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bigmodel.compat import deepspeed

    made: list[tuple[str, object, dict[str, object]]] = []

    def maker(name: str) -> object:
        return lambda groups, **kwargs: made.append((name, groups, kwargs))

    monkeypatch.setattr(deepspeed, "import_deepspeed", lambda device: None)
    for module in ("adam", "adagrad"):
        name = f"DeepSpeedCPU{module.capitalize()}"
        fake = SimpleNamespace(**{name: maker(f"{module}.{name}")})
        monkeypatch.setitem(sys.modules, f"deepspeed.ops.{module}", fake)
    optimizer = kind(nn.Linear(1, 1).parameters(), lr=0.25, weight_decay=0.125)  # type: ignore[call-arg]
    deepspeed.map_pytorch_optim_to_deepspeed(optimizer)
    name, groups, kwargs = made[0]
    assert (name, groups) == (becomes, optimizer.param_groups)
    assert kwargs.pop("adamw_mode", None) is decays_as_adamw
    assert kwargs == {"lr": 0.25, "weight_decay": 0.125}
