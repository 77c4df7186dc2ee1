"""Weights that were tied and lie on two devices: a step of an optimizer that would train them apart is refused.

Each is a copy of one weight, which is right without gradients. `prepare_training` refuses to train them; a model that
is trained without it is refused here, before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...errors import DispatchError
from ..placement.tensors import PlacedTensor


class UntiedWeights:
    """The weights of one dispatched model that are no longer tied.

    Args:
        ties: For each further name of a tied tensor, its first name.
        placed: The model's tensors by name, where they belong now.
    """

    def __init__(self, ties: Mapping[str, str], placed: Mapping[str, PlacedTensor]) -> None:
        self._pairs = [
            (placed[first], placed[name])
            for name, first in ties.items()
            if not placed[name].is_buffer and _now(placed[first]).device != _now(placed[name]).device
        ]

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def watch(self) -> RemovableHandle:
        """Have optimizers raise DispatchError in place of a step that writes to one of them."""
        return register_optimizer_step_pre_hook(self._refuse)

    def _refuse(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        written = {id(each) for group in optimizer.param_groups for each in group["params"] if each.grad is not None}
        for first, other in self._pairs:
            one, another = _now(first), _now(other)
            if not written.isdisjoint((id(one), id(another))):
                raise DispatchError(
                    f"{first.name} and {other.name} were one tied weight, but the device map has them on {one.device} "
                    f"and {another.device}, where they would be trained apart: map both to one device, or call "
                    "requires_grad_(False) on them"
                )


def _now(placed: PlacedTensor) -> torch.Tensor:
    """Return a tensor of the model as it is now."""
    tensor: torch.Tensor = placed.registry[placed.key]
    return tensor
