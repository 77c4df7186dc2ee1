from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bigmodel.errors import PlanError
from bigmodel.profile.training_model import trainable_clone, training_inputs

from .models import Flat, on_meta, tiny_llama

CPU = torch.device("cpu")


def clone(model: Any, checkpointing: bool = False) -> Any:
    return trainable_clone(model, FakeTensorMode(allow_non_fake_inputs=True), CPU, checkpointing)


def test_a_copy_trains_what_the_model_trains_and_the_model_is_left_alone() -> None:
    model = tiny_llama().eval().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    copy = clone(model)
    assert [name for name, parameter in copy.named_parameters() if parameter.requires_grad] == ["lm_head.weight"]
    assert all(isinstance(parameter.data, FakeTensor) for parameter in copy.parameters())
    assert (copy.training, model.training) == (True, False)


def test_only_a_model_that_can_run_its_blocks_again_is_asked_to() -> None:
    assert clone(tiny_llama(), checkpointing=True).is_gradient_checkpointing
    with pytest.raises(PlanError, match="Flat cannot recompute"):
        clone(Flat(), checkpointing=True)


def test_texts_have_the_tokens_that_are_asked_for_and_images_the_size_of_the_config() -> None:
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
