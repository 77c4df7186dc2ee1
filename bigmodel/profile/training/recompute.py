"""Recomputed calls: the forward saves only its inputs, and the backward recomputes the module.

This is gradient checkpointing (Chen et al. 2016, arXiv:1604.06174) for modules whose weights leave the device between
forward and backward. Streamed training and its prediction on fake tensors share it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...devices.nested import flatten

Gradients = Sequence[torch.Tensor | None]
"""A gradient for each tensor; None for tensors without one."""


_TENSOR = object()
"""Placeholder for a tensor in an output; None is a valid output."""


class RecomputedCall(ABC):
    """One call of a module: computed without a graph in the forward, and recomputed in the backward.

    Args:
        args: positional arguments of the module.
        kwargs: keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._first, self._rebuild = flatten((args, kwargs), registered=True)
        self._positions = [at for at, leaf in enumerate(self._first) if isinstance(leaf, torch.Tensor)]
        self._others = [None if isinstance(leaf, torch.Tensor) else snapshot(leaf) for leaf in self._first]
        self._output: tuple[list[Any], Callable[[Iterable[Any]], Any]] | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()

    @abstractmethod
    def compute_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the module's output, without a graph."""

    def further_weights(self) -> Sequence[torch.Tensor]:
        """Return weights that `compute_first` has used beside those given, to receive gradients too."""
        return ()

    def refuse_written_arguments(self) -> None:  # noqa: B027 (optional)
        """Called if the module has written into a container among its arguments; may raise."""

    def note_written_tensors(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 (optional)
        """Called with the tensors among its arguments that the module has written into; may raise."""

    @abstractmethod
    def gradients(self, inputs: Sequence[torch.Tensor], received: Gradients) -> Gradients:
        """Return the gradients of the inputs, of the weights and of the further ones, from those of the outputs.

        Args:
            inputs: the tensors among the arguments, as leaves; those that need a gradient require one.
            received: the gradient of each tensor of the output.
        """

    def run(self, weights: Iterable[torch.Tensor]) -> Any:
        """Return the module's output; gradients flow through it to the inputs and to `weights`."""
        inputs = [self._first[at] for at in self._positions]
        with torch.no_grad():
            self._tensors = self._outputs()
        tensors = _Run.apply(self, *inputs, *weights, *self.further_weights())
        remaining = iter(tensors)
        assert self._output is not None
        leaves, rebuild = self._output
        self._output = None
        return rebuild(next(remaining) if leaf is _TENSOR else leaf for leaf in leaves)

    def arguments_again(self, inputs: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a recomputation, with `inputs` as their tensors and caches in their first state."""
        leaves = [snapshot(leaf) for leaf in self._others]
        for position, tensor in zip(self._positions, inputs, strict=True):
            leaves[position] = tensor
        args, kwargs = self._rebuild(leaves)
        return args, kwargs

    def tensors_of(self, output: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors of an output, and store its structure and its other leaves."""
        leaves, rebuild = flatten(output, registered=True)
        self._output = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], rebuild
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _outputs(self) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._rebuild(self._first)
        given, self._first = self._first, []
        versions = [_version(leaf) for leaf in given]
        output = self.compute_first(args, kwargs)
        leaves, _ = flatten((args, kwargs), registered=True)
        if len(leaves) != len(given) or any(one is not other for one, other in zip(leaves, given)):
            self.refuse_written_arguments()
        written = [leaf for leaf, version in zip(given, versions, strict=True) if _version(leaf) != version]
        if written:
            with torch.enable_grad():
                self.note_written_tensors(written)
        return self.tensors_of(output)


def _version(leaf: Any) -> int:
    """Return the version counter of a tensor; 0 for what has none."""
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0


class _Run(torch.autograd.Function):
    """forward(call, *inputs, *weights) -> outputs"""

    @staticmethod
    def forward(ctx: Any, call: RecomputedCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors[: len(call._positions)])
        outputs, call._tensors = call._tensors, ()
        ctx.mark_non_differentiable(*[out for out in outputs if not out.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *received: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1 : 1 + len(saved)]
        inputs = [tensor.detach().requires_grad_(needed) for tensor, needed in zip(saved, wanted, strict=True)]
        return (None, *ctx.call.gradients(inputs, received))


def gradients_of(
    outputs: Sequence[torch.Tensor], received: Gradients, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradient of each source that requires one and has one, None for the others.

    Args:
        outputs: tensors computed from `sources`.
        received: their gradients.
        sources: leaves.
    """
    pairs = [(out, grad) for out, grad in zip(outputs, received, strict=True) if grad is not None and out.requires_grad]
    wanted = [source for source in sources if source.requires_grad]
    if not pairs or not wanted:
        return [None] * len(sources)
    found = torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
    remaining = iter(found)
    return [next(remaining) if source.requires_grad else None for source in sources]


def other_parameter(outputs: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> nn.Parameter | None:
    """Return a parameter to which gradients of `outputs` would flow and that is none of `sources`; None for none."""
    known = {id(source) for source in sources}
    return next((leaf for leaf in leaves_of(outputs) if isinstance(leaf, nn.Parameter) and id(leaf) not in known), None)


def leaves_of(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves to which gradients of `outputs` would flow."""
    waiting = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def snapshot(leaf: Any) -> Any:
    """Return a shallow copy of a key-value cache; anything else unchanged.

    The module appends to the cache, and the recomputation must start from the same cache as the first computation.
    """
    layers = getattr(leaf, "layers", None)
    if not isinstance(layers, list):
        return leaf
    kept = copy.copy(leaf)
    kept.layers = [copy.copy(layer) for layer in layers]
    return kept
