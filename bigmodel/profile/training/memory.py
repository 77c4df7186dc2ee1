"""Training memory of one rank: weights, gradients, optimizer state, activations and communication buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ...arguments import check_choice, check_flags, check_model, optional_whole_number, whole_number
from ...devices import HOST, virtual
from ..model.units import UnitProfile, profile_units
from .step import BACKWARD, FORWARD, LOSS, OPTIMIZER, PHASES, REDUCING, TrainingStep, check_optimizer


@dataclass(frozen=True)
class TrainingMemory:
    """Predicted bytes of one training rank.

    Attributes:
        weights: parameters of the rank.
        buffers: buffers.
        gradients: gradients of the rank after the backward.
        optimizer: optimizer state.
        activations: peak of all other tensors in the forward, mostly saved for the backward.
        communication: gradient buckets, and gathered parameters.
        total: the peak; less than the sum if activations peak before gradients are allocated.
    """

    weights: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    total: int


def training_memory(
    model: nn.Module,
    batch_size: int = 1,
    context_length: int | None = None,
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
    checkpointing: bool = False,
    ranks: int = 1,
    strategy: str = "ddp",
    device_type: str = "cpu",
) -> TrainingMemory:
    """Predict the memory of one rank that trains `model`, a transformers model, without allocating it.

    The prediction is for a step after the first, when optimizer state exists. Gradients are None between steps.

    Args:
        model: a transformers model of text or images, also on meta; not changed. `requires_grad` is respected.
        batch_size: samples of one rank.
        context_length: tokens of each; None: as `profile_model` does.
        optimizer: one of `OPTIMIZERS`, or a function of parameters that returns one.
        checkpointing: blocks save only their inputs, and are recomputed in the backward.
        ranks: processes that train together.
        strategy: "ddp" (each rank has the whole model; gradients are reduced in buckets) or "fsdp" (each has a shard
            and gathers one block at a time, as `torch.distributed.fsdp.fully_shard` does).
        device_type: kind of device that it will run on.

    Raises:
        PlanError: an argument is invalid, or the model has no loss.
    """
    check_model(model)
    check_optimizer(optimizer)
    check_choice("strategy", strategy, STRATEGIES)
    check_flags(checkpointing=checkpointing)
    ranks, batch_size = whole_number("ranks", ranks, least=1), whole_number("batch_size", batch_size, least=1)
    context_length = optional_whole_number("context_length", context_length, least=1)
    if checkpointing and device_type == virtual.TYPE:
        device_type = HOST  # autograd cannot recompute on the virtual accelerator, which computes as the host does
    step = TrainingStep(model, batch_size, context_length, optimizer, checkpointing, device_type)
    step.record()
    sharding = sharding_of(model, ranks, strategy)
    share = sharding.share
    kept = share(step.weights) + step.buffers + share(step.state)
    beside = {phase: step.peak_beside(phase, share) + sharding.held_in(phase) for phase in PHASES}
    beside[OPTIMIZER] = share(step.peak_beside(OPTIMIZER, lambda nbytes: nbytes)) + sharding.held_in(OPTIMIZER)
    return TrainingMemory(
        weights=share(step.weights),
        buffers=step.buffers,
        gradients=share(step.gradients),
        optimizer=share(step.state),
        activations=step.peak_beside(FORWARD, lambda _: 0),
        communication=max(sharding.held_in(phase) for phase in PHASES),
        total=kept + max(beside.values()),
    )


DDP, FSDP = "ddp", "fsdp"
STRATEGIES = (DDP, FSDP)


@dataclass(frozen=True)
class Sharding:
    """The sharding of a model among ranks.

    Attributes:
        ranks: ranks among which parameters, gradients and state are divided; 1 if each has all.
        held: peak bytes of gathered parameters, whole gradients and buckets, by phase.
    """

    ranks: int
    held: Mapping[str, int]

    def share(self, nbytes: int) -> int:
        """Return the bytes of one rank's shard."""
        return -(-nbytes // self.ranks)

    def held_in(self, phase: str) -> int:
        """Return the bytes of communication buffers in one of `PHASES`."""
        return self.held.get(phase, 0)


def sharding_of(model: nn.Module, ranks: int, strategy: str) -> Sharding:
    """Return the sharding of `model` among `ranks`.

    Under DDP the reducer has a bucket for every gradient. Under FSDP (`fully_shard` of every block, then of the rest)
    the parameters of the rest are gathered from its forward to the end of the backward. In addition there are: in the
    forward, and in the backward before it reaches a block, the gathered parameters of one block; then also those of the
    next block; and while gradients are reduced, the unsharded gradients of one block and the inputs of their reduction.
    """
    if ranks == 1:
        return Sharding(1, {})
    if strategy == DDP:
        trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        return Sharding(1, dict.fromkeys(PHASES, trained))
    units = profile_units(model)
    largest = max((unit.weights for unit in units if unit.is_block), default=0)
    rest = _weights_of_rest(units)
    held = {FORWARD: rest + largest, LOSS: rest + largest, BACKWARD: rest + 2 * largest, REDUCING: rest + 4 * largest}
    return Sharding(ranks, held)


def _weights_of_rest(units: list[UnitProfile]) -> int:
    storages = {
        storage: spec.nbytes
        for unit in units
        if not unit.is_block
        for storage, spec in unit.storages.items()
        if not spec.is_buffer
    }
    return sum(storages.values())
