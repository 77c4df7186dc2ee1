"""Gradients through a streamed block.

Between its forward and its backward a streamed block's weights leave the device, so autograd cannot keep them. The
forward therefore keeps only the block's inputs; the backward streams the block in again, computes it once more with
gradients on, and hands the gradients of its weights to the host parameters. (The idea is gradient checkpointing,
Chen et al. 2016, arXiv:1604.06174, with the weights checkpointed too.)

What is on the device meanwhile: from forward to backward the inputs of every block; in a block's backward its slot
(the same slots as in forward), all that autograd keeps of that one block, and the gradients of its weights, which go
to the host together when the block is done. Whatever raises, the slot is given back and the host's weights are shown
again; of gradients, those of blocks that backward had already passed remain, as after any backward that raised:
`zero_grad()` before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import DispatchError
from .block import Block
from .parameter import like
from .quantized_block import QuantizedBlock
from .streamer import Streamer
from .surroundings import Surroundings, snapshot, unchanged_buffers

Compute = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def wants_gradients(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd is on and anything that goes into `block` requires a gradient."""
    if not torch.is_grad_enabled():
        return False
    if any(tensor.value.requires_grad for tensor in (*block.tensors, *block.nested)):
        return True
    leaves, _ = tree_flatten((args, kwargs))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def stream_and_compute(
    streamer: Streamer,
    block: Block,
    module: nn.Module,
    compute: Compute,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Compute `module` while `block`, its weights, is on the device; gradients flow where they are wanted.

    Args:
        streamer: What brings the block to the device.
        block: The module's weights.
        module: The module, for its buffers.
        compute: The module's plain forward, called with args and kwargs as a tuple and a dict.
        args: What the module was called with.
        kwargs: Likewise.
    """
    if not wants_gradients(block, args, kwargs):
        return streamer.visit(block, compute, args, kwargs)
    if block.encloses:
        return _through_copies(streamer, block, compute, args, kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    call = _Call(streamer, block, module, compute, leaves, structure, positions)
    host = [tensor.value for tensor in (*block.tensors, *block.nested)]
    outputs = _Visit.apply(call, *[leaves[i] for i in positions], *host)
    return call.rebuild_output(outputs)


class _Call:
    """One call of one block: how to compute it, now and once more in backward."""

    def __init__(
        self,
        streamer: Streamer,
        block: Block,
        module: nn.Module,
        compute: Compute,
        leaves: list[Any],
        structure: Any,
        positions: list[int],
    ) -> None:
        self.streamer = streamer
        self.block = block
        self.module = module
        self.compute = compute
        self.positions = positions
        self._structure = structure
        self._others = [None if isinstance(leaf, torch.Tensor) else snapshot(leaf) for leaf in leaves]
        self._first = leaves
        self._surroundings = Surroundings(streamer.device)
        self._output_structure: Any = None
        self._output_leaves: list[Any] = []

    def run(self) -> tuple[torch.Tensor, ...]:
        """Compute the block for the first time, without a graph."""
        args, kwargs = tree_unflatten(self._first, self._structure)
        self._first = []
        return self._flatten_output(self.streamer.visit(self.block, self.compute, args, kwargs))

    def run_again(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Compute the block once more from `inputs`, as it was computed the first time."""
        leaves = list(self._others)
        for position, tensor in zip(self.positions, inputs):
            leaves[position] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        with self._surroundings.restored():
            return self._flatten_output(self.compute(args, kwargs))

    def gradients(
        self, inputs: tuple[torch.Tensor, ...], received: tuple[torch.Tensor | None, ...], slab: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs, and on the host those of its weights, which lie in `slab` now."""
        weights = trainable_views(self.block, slab)
        self.block.show(weights)
        with unchanged_buffers(self.module):
            with torch.enable_grad():
                outputs = self.run_again(inputs)
            # What is fetched by itself within the block takes part as the host tensor that it is.
            nested = [tensor.value for tensor in self.block.nested]
            found = iter(_gradients(outputs, received, [*inputs, *weights, *nested]))
        result = [next(found) for _ in inputs]
        for tensor in (*self.block.tensors, *self.block.nested):
            gradient = next(found)
            result.append(None if gradient is None else gradient.to(tensor.value.device, tensor.value.dtype))
        return result

    def _flatten_output(self, output: Any) -> tuple[torch.Tensor, ...]:
        leaves, self._output_structure = tree_flatten(output)
        self._output_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def rebuild_output(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the module's output with `tensors` in the places of its tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is None else leaf for leaf in self._output_leaves]
        self._output_leaves = []
        return tree_unflatten(leaves, self._output_structure)


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
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        _refuse_quantized(call.block)
        inputs = tuple(
            saved.detach().requires_grad_(needed) for saved, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:])
        )
        found = call.streamer.visit_slot(call.block, lambda slot: call.gradients(inputs, gradients, slot.slab))
        return (None, *found)


def _refuse_quantized(block: Block) -> None:
    """Raise for weights that are computed with rounded: a gradient would be that of other weights than are changed."""
    name = block.refuse_training() if isinstance(block, QuantizedBlock) else None
    if name is not None:
        raise DispatchError(
            f"{name} cannot be trained: it is quantised on its way to the device. Dispatch the model without "
            "offload_dtype to train it, or call requires_grad_(False) on its weights to train what is around them"
        )


def _gradients(
    outputs: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor | None, ...], sources: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradient of each source that requires one, None for the others."""
    pairs = [(out, grad) for out, grad in zip(outputs, gradients) if grad is not None and out.requires_grad]
    wanted = [source for source in sources if source.requires_grad]
    if not pairs or not wanted:
        return [None] * len(sources)
    found = iter(_grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs]))
    return [next(found) if source.requires_grad else None for source in sources]


def _grad(outputs: list[torch.Tensor], wanted: list[torch.Tensor], gradients: list[torch.Tensor]) -> Any:
    try:
        return torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise DispatchError(
            "a streamed block holds a checkpoint with use_reentrant=True, through which PyTorch gives no gradients of "
            "single tensors. Pass use_reentrant=False, or leave checkpointing off: streamed blocks keep nothing but "
            "their inputs between forward and backward anyway"
        ) from error


def _through_copies(
    streamer: Streamer, block: Block, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute with device copies that autograd keeps. For the few tensors a module holds itself around other blocks:
    computing all of those once more would cost far more than keeping these."""

    def run() -> Any:
        for tensor in block.tensors:
            if tensor.value.requires_grad:
                tensor.show(tensor.value.to(streamer.device, tensor.device_dtype))
        return compute(args, kwargs)

    return streamer.visit(block, run)


def trainable_views(block: Block, slab: torch.Tensor) -> list[torch.Tensor]:
    """Return fresh leaves viewing `slab` that require a gradient where the host tensors do."""
    return [like(t.value, view.detach()) for t, view in zip(block.tensors, block.layout.views(slab))]
