"""The states before a model's output layer, of some rows; the output layer computes the logits of others only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bigmodel.errors import ServeError
from bigmodel.profile.model.stage import PassedHead


class HiddenRows:
    """The states that were taken: [rows, width]."""

    def __init__(self) -> None:
        self._states: torch.Tensor | None = None

    def put(self, states: torch.Tensor) -> None:
        """Keep the states of one forward."""
        self._states = states

    @property
    def states(self) -> torch.Tensor:
        """The states. Raises ServeError if the output layer was not called."""
        if self._states is None:
            raise ServeError("the model computes its output without its output layer; its states cannot be read")
        return self._states


def output_layer(model: torch.nn.Module) -> torch.nn.Module | None:
    """The layer that makes logits of states; None for models without one, or with it in another process."""
    find: Any = getattr(model, "get_output_embeddings", None)
    found: Any = None if find is None else find()
    return found if isinstance(found, torch.nn.Module) and not isinstance(found, PassedHead) else None


@contextmanager
def taking_states(model: torch.nn.Module, taken: Sequence[int], passed: Sequence[int]) -> Iterator[HiddenRows]:
    """Within this context, a forward of one text takes the states of some rows.

    Args:
        model: The model.
        taken: Rows, of those that the output layer is given, whose states are wanted.
        passed: Rows for which the output layer computes logits, in this order; at least one.
    """
    layer = output_layer(model)
    if layer is None:
        raise ServeError(f"{type(model).__name__} has no output layer in this process; its states cannot be read")
    rows = HiddenRows()

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        states: torch.Tensor = args[0]
        rows.put(states[0, torch.tensor(taken, device=states.device)])
        return (states[:, torch.tensor(passed, device=states.device)], *args[1:])

    hook = layer.register_forward_pre_hook(before)
    try:
        yield rows
    finally:
        hook.remove()
