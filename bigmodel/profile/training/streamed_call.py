"""Streamed training on fake tensors: modules with weights on the host compute as under `dispatch`.

The weights of a streamed module are on the device only while it computes. The forward saves only its inputs; the
backward recomputes the module, and copies the gradients of its weights to the host. The table of an embedding stays on
the host, and the looked-up rows are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...devices import HOST
from .recompute import Gradients, RecomputedCall, gradients_of

Owner = tuple[dict[str, Any], str]
"""A module's registry of parameters, and a name in it."""


def hold_on_host(model: nn.Module, names: Collection[str], device: torch.device) -> list[torch.Tensor]:
    """Move the weights of modules of a fake model to the host; calls copy them to `device`.

    Call it inside the `FakeTensorMode`.

    Args:
        model: its parameters are fake, on `device`; changed.
        names: names of the modules.
        device: their execution device.

    Returns:
        The tensors that stand for the weights in their slots on the device; not counted as activations.
    """
    slots: list[torch.Tensor] = []
    moved: dict[int, nn.Parameter] = {}
    before: list[nn.Parameter] = []  # kept alive: an id may be reused once its object is gone
    for name in names:
        module = model.get_submodule(name)
        owners = _owners(module)
        there = {at: owners[at][0][0][owners[at][0][1]].detach() for at in owners}
        for at, found in owners.items():
            if at not in moved:
                old = found[0][0][found[0][1]]
                host = torch.empty(old.shape, dtype=old.dtype, device=HOST)
                before.append(old)
                moved[at] = nn.Parameter(host, requires_grad=old.requires_grad)
            for registry, key in found:
                registry[key] = moved[at]
        forward: Any = module.forward
        if type(module) is nn.Embedding:
            module.forward = _looked_up(forward, device)  # type: ignore[method-assign]
        elif owners:
            slots += there.values()
            weights = [(owners[at], moved[at], there[at]) for at in owners]
            module.forward = _Streamed(module, forward, weights)
    return slots


def _owners(module: nn.Module) -> dict[int, list[Owner]]:
    found: dict[int, list[Owner]] = {}
    for inner in module.modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((inner._parameters, key))
    return found


def _looked_up(forward: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    def look_up(ids: torch.Tensor) -> torch.Tensor:
        return forward(ids.to(HOST)).to(device)

    return look_up


class _Streamed:
    """The forward of a module whose weights are streamed to the device."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        weights: list[tuple[list[Owner], nn.Parameter, torch.Tensor]],
    ) -> None:
        self.module = module
        self.forward = forward
        self.weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        host = [held for _, held, _ in self.weights]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*tensors, *host)):
            return self.compute(args, kwargs, [there for *_, there in self.weights])
        return _Call(self, args, kwargs).run(host)

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[torch.Tensor]) -> Any:
        """Compute with `weights` in place of those on the host."""
        with _shown([(owners, value) for (owners, *_), value in zip(self.weights, weights, strict=True)]):
            return self.forward(*args, **kwargs)


@contextmanager
def _shown(weights: list[tuple[list[Owner], torch.Tensor]]) -> Iterator[None]:
    before = [(registry, key, registry[key]) for owners, _ in weights for registry, key in owners]
    for owners, value in weights:
        for registry, key in owners:
            registry[key] = value
    try:
        yield
    finally:
        for registry, key, value in before:
            registry[key] = value


class _Call(RecomputedCall):
    """One call of a streamed module."""

    def __init__(self, streamed: _Streamed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(args, kwargs)
        self._streamed = streamed

    def compute_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._streamed.compute(args, kwargs, [there for *_, there in self._streamed.weights])

    def gradients(self, inputs: Sequence[torch.Tensor], received: Gradients) -> Gradients:
        args, kwargs = self.arguments_again(inputs)
        weights = [there.detach().requires_grad_(held.requires_grad) for _, held, there in self._streamed.weights]
        buffers = [buffer.clone() for buffer in self._streamed.module.buffers()]  # freed at the end of the backward
        with torch.enable_grad():
            outputs = self.tensors_of(self._streamed.compute(args, kwargs, weights))
        found = gradients_of(outputs, received, [*inputs, *weights])
        del buffers
        host = (None if each is None else each.to(HOST) for each in found[len(inputs) :])
        return [*found[: len(inputs)], *host]
