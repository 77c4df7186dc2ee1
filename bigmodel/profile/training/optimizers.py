"""Optimizers that training is predicted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ...arguments import shown
from ...errors import PlanError

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Called with a list of parameters."""

OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}
"""Optimizers by name; any function of parameters will do, too."""


def check_optimizer(optimizer: object) -> None:
    """Refuse what is no optimizer.

    Raises:
        PlanError: it is neither a name out of `OPTIMIZERS` nor a function.
    """
    known = optimizer in OPTIMIZERS if isinstance(optimizer, str) else callable(optimizer)
    if not known or isinstance(optimizer, nn.Module):
        raise PlanError(f"optimizer is {shown(optimizer)}; use one of {', '.join(OPTIMIZERS)}, or give a function")


def make_optimizer(optimizer: str | MakeOptimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters.

    Args:
        optimizer: one of `OPTIMIZERS`, or a function that makes one from parameters.
        parameters: what it changes.

    Raises:
        PlanError: the function takes no list of parameters, or makes something else.
    """
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    try:
        made = make(parameters)
    except TypeError as error:
        raise PlanError(f"optimizer cannot be made of a list of parameters by {shown(optimizer)}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise PlanError(f"optimizer made {shown(made)} from parameters; it must make a torch.optim.Optimizer")
    return made
