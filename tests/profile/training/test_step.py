from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bigmodel.errors import PlanError
from bigmodel.profile.training.step import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OPTIMIZERS,
    REDUCING,
    TrainingStep,
    check_optimizer,
    make_optimizer,
    trainable_clone,
    training_inputs,
)

from ..models import Flat, on_meta, tiny_llama


def parameters() -> list[nn.Parameter]:
    return list(nn.Linear(4, 4).parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_made_by_its_name(name: str) -> None:
    check_optimizer(name)
    made = make_optimizer(name, parameters())
    assert type(made).__name__.lower() == name
    assert len(made.param_groups[0]["params"]) == 2


def test_any_function_of_parameters_is_accepted() -> None:
    def slow(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-9)

    check_optimizer(slow)
    assert make_optimizer(slow, parameters()).defaults["lr"] == 1e-9


@pytest.mark.parametrize("optimizer", ["adamax", 3, None, nn.Linear(2, 2)])
def test_an_unknown_optimizer_is_refused_with_those_known(optimizer: object) -> None:
    with pytest.raises(PlanError, match="use one of adamw, adam"):
        check_optimizer(optimizer)


def test_a_function_that_returns_no_optimizer_is_refused() -> None:
    with pytest.raises(PlanError, match="returned a list"):
        make_optimizer(list, parameters())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="takes no arguments"):
        make_optimizer(object, parameters())  # type: ignore[arg-type]


CPU = torch.device("cpu")


def clone(model: Any, checkpointing: bool = False) -> Any:
    return trainable_clone(model, FakeTensorMode(allow_non_fake_inputs=True), CPU, checkpointing)


def test_a_clone_trains_the_same_parameters_and_the_model_is_unchanged() -> None:
    model = tiny_llama().eval().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    copy = clone(model)
    assert [name for name, parameter in copy.named_parameters() if parameter.requires_grad] == ["lm_head.weight"]
    assert all(isinstance(parameter.data, FakeTensor) for parameter in copy.parameters())
    assert (copy.training, model.training) == (True, False)


def test_checkpointing_of_a_model_that_does_not_support_it_is_refused() -> None:
    assert clone(tiny_llama(), checkpointing=True).is_gradient_checkpointing
    with pytest.raises(PlanError, match="Flat does not support gradient checkpointing"):
        clone(Flat(), checkpointing=True)


def test_texts_have_the_given_tokens_and_images_the_size_in_the_config() -> None:
    texts = training_inputs(tiny_llama(), 2, 5, CPU)
    assert {name: tuple(value.shape) for name, value in texts.items()} == {"input_ids": (2, 5), "labels": (2, 5)}
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_channels=1)
    images = training_inputs(on_meta(t.ResNetForImageClassification, config), 2, 5, CPU)
    shapes = {name: tuple(value.shape) for name, value in images.items()}
    assert shapes == {"pixel_values": (2, 1, 224, 224), "labels": (2,)}


def test_a_model_without_a_loss_or_of_other_inputs_is_refused() -> None:
    with pytest.raises(PlanError, match="takes no labels"):
        training_inputs(Flat(), 2, 5, CPU)
    model = tiny_llama()
    model.main_input_name = "voltages"
    with pytest.raises(PlanError, match="'voltages'"):
        training_inputs(model, 2, 5, CPU)


CONFIG = t.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=64)


def recorded(model: torch.nn.Module) -> TrainingStep:
    step = TrainingStep(model, 2, 16, "sgd", False, "cpu")
    step.record()
    return step


@pytest.mark.slow
def test_all_gradients_exist_in_the_optimizer_phase_and_none_in_the_forward() -> None:
    step = recorded(t.LlamaForCausalLM(CONFIG))
    none = {phase: step.peak_beside(phase, lambda _: 0) for phase in (FORWARD, OPTIMIZER)}
    assert step.peak_beside(FORWARD, int) == none[FORWARD]
    assert step.peak_beside(OPTIMIZER, int) == none[OPTIMIZER] + step.gradients


@pytest.mark.slow
def test_gradients_of_blocks_come_after_those_of_the_head() -> None:
    model = t.LlamaForCausalLM(CONFIG)
    step = recorded(model)
    beside = {
        phase: step.peak_beside(phase, int) - step.peak_beside(phase, lambda _: 0) for phase in (BACKWARD, REDUCING)
    }
    assert 0 <= beside[BACKWARD] <= model.lm_head.weight.nbytes + model.model.norm.weight.nbytes
    assert beside[REDUCING] > beside[BACKWARD]


@pytest.mark.slow
def test_the_model_is_unchanged() -> None:
    model = t.LlamaForCausalLM(CONFIG).eval()
    recorded(model)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_of_unknown_inputs_is_refused() -> None:
    model = t.LlamaForCausalLM(CONFIG)
    model.main_input_name = "voltages"
    with pytest.raises(PlanError, match="voltages"):
        recorded(model)
