"""What training with several ranks takes of each: the share it keeps, and what it holds to communicate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..model.units import UnitProfile, profile_units

DDP, FSDP = "ddp", "fsdp"
STRATEGIES = (DDP, FSDP)
FORWARD, LOSS, BACKWARD, REDUCING, OPTIMIZER = "forward", "loss", "backward", "reducing", "optimizer"
PHASES = (FORWARD, LOSS, BACKWARD, REDUCING, OPTIMIZER)
"""Of a step of training: the backward is that of the "loss" until it comes to the last block, and "reducing" from the
first gradient of a block on."""


@dataclass(frozen=True)
class Sharding:
    """How one rank of several holds a model.

    Attributes:
        ranks: among how many what it keeps is divided; 1 if each has everything.
        held: bytes of whole parameters, whole gradients and buckets that it holds in a phase, at its most.
    """

    ranks: int
    held: Mapping[str, int]

    def share(self, nbytes: int) -> int:
        """Return the bytes of one rank's share."""
        return -(-nbytes // self.ranks)

    def held_in(self, phase: str) -> int:
        """Return the bytes held to communicate in one of `PHASES`."""
        return self.held.get(phase, 0)


def sharding_of(model: nn.Module, ranks: int, strategy: str) -> Sharding:
    """Return how one of `ranks` holds `model`.

    Under DDP the reducer keeps a bucket for every gradient beside it. Under FSDP (`fully_shard` of every block, then
    of the rest) the rest is whole from its forward to the end of the backward. Beside it there are, in the forward, one
    block's whole parameters, as in the backward before it comes to a block; then also those of the block that comes
    next; and while gradients are reduced, one block's whole gradients with what they are reduced from.
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
