"""Modules whose weights lie on the host, on fake tensors: they compute, forward and backward, as `dispatch` has them.

A streamed module's weights are on the device only while it computes. Its forward keeps its inputs alone; its backward
computes it once more, and what gradients its weights get there are brought to the host. A table that rows are looked
up in is not brought: the rows are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..devices import HOST

Owner = tuple[dict[str, Any], str]
"""A module's registry of parameters, and a name in it."""


def hold_on_host(model: nn.Module, names: Collection[str], device: torch.device) -> list[torch.Tensor]:
    """Have modules of a fake model hold their weights on the host, and visit `device` as they are called.

    To be called inside the fake tensors' mode.

    Args:
        model: whose parameters are fake, on `device`; changed.
        names: of the modules.
        device: where they compute.

    Returns:
        What stands for the weights in their slots on the device: it takes none of what is counted.
    """
    slots: list[torch.Tensor] = []
    moved: dict[int, nn.Parameter] = {}
    before: list[nn.Parameter] = []  # kept, for an id is that of one object only as long as that lives
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
    """The forward of a module whose weights visit the device."""

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
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        host = [held for _, held, _ in self.weights]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*tensors, *host)):
            return self.compute(args, kwargs, [there for *_, there in self.weights])
        call = _Call(self, leaves, structure)
        return call.output(_Visit.apply(call, *tensors, *host))

    def compute(self, args: Any, kwargs: Mapping[str, Any], weights: list[torch.Tensor]) -> Any:
        """Compute with `weights` in the places of those on the host."""
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


class _Call:
    """One call of a streamed module: computed now, and once more in the backward."""

    def __init__(self, streamed: _Streamed, leaves: list[Any], structure: Any) -> None:
        self.streamed = streamed
        self._first = leaves
        self._others = [None if isinstance(leaf, torch.Tensor) else _snapshot(leaf) for leaf in leaves]
        self.positions = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._structure = structure
        self._output: tuple[list[Any], Any] = [], None

    def run(self) -> tuple[torch.Tensor, ...]:
        args, kwargs = tree_unflatten(self._first, self._structure)
        self._first = []
        return self._tensors(self.streamed.compute(args, kwargs, [there for *_, there in self.streamed.weights]))

    def gradients(self, inputs: list[torch.Tensor], received: tuple[Any, ...]) -> list[torch.Tensor | None]:
        leaves = list(self._others)
        for position, tensor in zip(self.positions, inputs, strict=True):
            leaves[position] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        weights = [there.detach().requires_grad_(held.requires_grad) for _, held, there in self.streamed.weights]
        buffers = [buffer.clone() for buffer in self.streamed.module.buffers()]  # they are given back afterwards
        with torch.enable_grad():
            outputs = self._tensors(self.streamed.compute(args, kwargs, weights))
        found = _gradients(outputs, received, [*inputs, *weights])
        del buffers
        host = (None if each is None else each.to(HOST) for each in found[len(inputs) :])
        return [*found[: len(inputs)], *host]

    def _tensors(self, output: Any) -> tuple[torch.Tensor, ...]:
        leaves, structure = tree_flatten(output)
        self._output = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def output(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the module's output with `tensors` in the places of its tensors."""
        remaining = iter(tensors)
        leaves, structure = self._output
        self._output = [], None
        return tree_unflatten([next(remaining) if leaf is None else leaf for leaf in leaves], structure)


class _Visit(torch.autograd.Function):
    """forward(call, *inputs, *host weights) -> outputs"""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors[: len(call.positions)])
        outputs = call.run()
        ctx.mark_non_differentiable(*[out for out in outputs if not out.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *received: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        inputs = [
            saved.detach().requires_grad_(needed) for saved, needed in zip(ctx.saved_tensors, wanted, strict=False)
        ]
        return (None, *ctx.call.gradients(inputs, received))


def _gradients(
    outputs: tuple[torch.Tensor, ...], received: tuple[torch.Tensor | None, ...], sources: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    pairs = [(out, grad) for out, grad in zip(outputs, received, strict=True) if grad is not None and out.requires_grad]
    wanted = [source for source in sources if source.requires_grad]
    if not pairs or not wanted:
        return [None] * len(sources)
    found = torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
    remaining = iter(found)
    return [next(remaining) if source.requires_grad else None for source in sources]


def _snapshot(leaf: Any) -> Any:
    """Return a key-value cache as it is now: the module will append to it, and in the backward finds it as it was."""
    layers = getattr(leaf, "layers", None)
    if not isinstance(layers, list):
        return leaf
    snapshot = copy.copy(leaf)
    snapshot.layers = [copy.copy(layer) for layer in layers]
    return snapshot
