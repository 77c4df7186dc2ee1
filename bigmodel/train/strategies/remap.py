"""Sharding replaces a model's parameters: optimizers created before must refer to the new ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from bigmodel.errors import TrainError


class ParameterMap:
    """Maps each parameter that a model had before it was sharded to its present one."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[Any, nn.Parameter]] = {}
        self._before: dict[int, list[tuple[str, Any, int]]] = {}

    def remember(self, model: nn.Module) -> None:
        """Record the parameters of `model` before it is sharded."""
        self._before[id(model)] = [(name, ref(parameter), id(parameter)) for name, parameter in _named(model)]

    def learn(self, model: nn.Module) -> None:
        """Record the parameters of `model` after it was sharded."""
        now = dict(_named(model))
        for name, old, number in self._before.pop(id(model)):
            if now[name] is not old():
                self._new[number] = (old, now[name])

    def current(self, parameter: Any) -> Any:
        """Return the parameter that replaced `parameter`; itself if none did."""
        old, new = self._new.get(id(parameter), (None, parameter))
        return new if old is None or old() is parameter else parameter

    def repoint(self, optimizer: Optimizer) -> None:
        """Replace the parameters in the groups of `optimizer` by the new ones, in place.

        Raises:
            TrainError: the optimizer has stepped already; its state has the shapes of the old parameters.
        """
        changed = False
        for group in optimizer.param_groups:
            parameters = [self.current(parameter) for parameter in group["params"]]
            changed = changed or any(a is not b for a, b in zip(parameters, group["params"], strict=True))
            group["params"] = parameters
        if changed and optimizer.state:
            raise TrainError(
                "the optimizer has already stepped with parameters that were not sharded yet; "
                "call accelerator.prepare before the first step"
            )


def owners(model: nn.Module, parameters: Iterable[Any]) -> bool:
    """Whether any of `parameters` belongs to `model`."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for parameter in parameters)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))
