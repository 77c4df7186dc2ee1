"""What training takes, against the virtual accelerator's own books: to the byte."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import pytest
import torch
import transformers as t

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.errors import PlanError
from bigmodel.profile.training.memory import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    PHASES,
    REDUCING,
    TrainingMemory,
    sharding_of,
    training_memory,
)

from ...examples import alike
from ..models import tiny_llama

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip
DEVICE = "virtual:0"


def llama(**sizes: Any) -> Any:
    return t.LlamaForCausalLM(t.LlamaConfig(**{**SIZES, **sizes}))


def resnet() -> Any:
    return t.ResNetForImageClassification(t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))


@cache
def taken(optimizer: str = "adamw", **options: Any) -> TrainingMemory:
    """What training `llama()` takes in steps of 1 x 16 tokens."""
    return training_memory(llama(), 1, 16, optimizer, **options)


def measured(model: Any, inputs: dict[str, torch.Tensor], make: Any) -> int:
    """Return the peak bytes of the device in the second training step."""
    gc.collect()
    before = memory_allocated(DEVICE)
    model = model.train().to(DEVICE)
    inputs = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    optimizer = make(model.parameters())
    for step in range(2):
        if step:
            reset_peak_memory(DEVICE)
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return max_memory_allocated(DEVICE) - before


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@alike(("name", "make"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)], first=1)
def test_a_step_of_a_text_model_is_predicted_to_the_byte(name: str, make: Any) -> None:
    model = llama()
    predicted = training_memory(model, 2, 32, name, device_type="virtual")
    ids = torch.zeros(2, 32, dtype=torch.long)
    assert measured(model, {"input_ids": ids, "labels": ids.clone()}, make) == predicted.total + ids.nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_a_step_of_a_convnet_is_predicted_to_the_byte() -> None:
    model = resnet()
    predicted = training_memory(model, 2, optimizer="adamw", device_type="virtual")
    inputs = {"pixel_values": torch.zeros(2, 3, 224, 224), "labels": torch.zeros(2, dtype=torch.long)}
    assert measured(model, inputs, torch.optim.AdamW) == predicted.total


@pytest.mark.slow
def test_gradients_and_state_are_known_from_the_parameters() -> None:
    model = llama()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = taken()
    assert (found.weights, found.gradients) == (weights, weights)
    assert 2 * weights <= found.optimizer < 2 * weights + 8 * len(list(model.parameters()))
    assert taken("sgd").optimizer == 0


@pytest.mark.slow
def test_checkpointing_reduces_saved_activations() -> None:
    model = llama()
    assert training_memory(model, 4, 64, checkpointing=True).activations < training_memory(model, 4, 64).activations


@pytest.mark.slow
def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    model = llama()
    for parameter in model.model.layers.parameters():
        parameter.requires_grad_(False)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert training_memory(model, 1, 16).gradients == trained


@pytest.mark.slow
def test_ranks_under_ddp_have_the_whole_model_and_buckets() -> None:
    alone, together = taken(), taken(ranks=2)
    assert together.weights == alone.weights
    assert together.total == alone.total + alone.gradients


@pytest.mark.slow
def test_ranks_under_fsdp_have_shards() -> None:
    alone, two, four = (taken(ranks=ranks, strategy="fsdp") for ranks in (1, 2, 4))
    assert two.weights == alone.weights // 2
    assert four.optimizer == -(-alone.optimizer // 4)
    assert alone.total > two.total > four.total


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"strategy": "zero"}, "strategy is 'zero'"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"context_length": 10**6}, "allows"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        training_memory(llama(), **{"context_length": 16, **arguments})


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(PlanError, match="labels"):
        training_memory(torch.nn.Linear(2, 2), context_length=4)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model", "path/of/a/model"),
        ("batch_size", 0),
        ("context_length", 0),
        ("optimizer", "adamax"),
        ("optimizer", 3),
        ("optimizer", list),
        ("checkpointing", "yes"),
        ("ranks", 1.5),
        ("strategy", None),
    ],
)
def test_an_invalid_argument_is_named(argument: str, value: object) -> None:
    given = {"model": llama(), "context_length": 8, argument: value}
    with pytest.raises(PlanError, match=argument):
        training_memory(**given)


MODEL = tiny_llama()
BLOCK = sum(parameter.nbytes for parameter in MODEL.model.layers[0].parameters())
WHOLE = sum(parameter.nbytes for parameter in MODEL.parameters())
REST = WHOLE - BLOCK * len(MODEL.model.layers)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_keeps_everything_and_communicates_nothing(strategy: str) -> None:
    alone = sharding_of(MODEL, 1, strategy)
    assert alone.share(7) == 7
    assert {alone.held_in(phase) for phase in PHASES} == {0}


def test_under_ddp_there_is_a_bucket_for_every_gradient() -> None:
    assert sharding_of(MODEL, 4, "ddp").held_in(OPTIMIZER) == WHOLE
    assert sharding_of(MODEL, 4, "ddp").share(8) == 8


def test_under_fsdp_one_block_is_gathered_at_a_time_and_the_rest_throughout() -> None:
    sharding = sharding_of(MODEL, 4, "fsdp")
    assert sharding.share(9) == 3
    assert sharding.held_in(FORWARD) == REST + BLOCK
    assert sharding.held_in(LOSS) == REST + BLOCK
    assert sharding.held_in(BACKWARD) == REST + 2 * BLOCK
    assert sharding.held_in(REDUCING) == REST + 4 * BLOCK
    assert sharding.held_in(OPTIMIZER) == 0
