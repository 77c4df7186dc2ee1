"""Gradients through a streamed block.

Between its forward and its backward a streamed block's weights leave the device, so autograd cannot keep them. The
forward therefore keeps only the block's inputs; the backward streams the block in again, computes it once more with
gradients on, and hands the gradients of its weights to the host parameters.

What is on the device meanwhile: from forward to backward the inputs of every block; in a block's backward its slot
(the same slots as in forward), all that autograd keeps of that one block, and the gradients of its weights, which go
to the host together when the block is done. Whatever raises, the slot is given back and the host's weights are shown
again; of gradients, those of blocks that backward had already passed remain, as after any backward that raised:
`zero_grad()` before the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from ...devices.nested import iter_tensors
from ...errors import DispatchError
from ...profile.training.recompute import Gradients, RecomputedCall, gradients_of
from ..weights.block import Block, version_of
from ..weights.parameters import like
from ..weights.quantized_block import QuantizedBlock
from .replay_state import Surroundings, refuse_hidden_tensors, unchanged_buffers
from .streamer import Streamer

Compute = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def wants_gradients(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd is on and anything that goes into `block` requires a gradient."""
    if not torch.is_grad_enabled():
        return False
    with DisableTorchFunctionSubclass():
        if any(tensor.value.requires_grad for tensor in (*block.tensors, *block.nested)):
            return True
    return any(tensor.requires_grad for tensor in iter_tensors((args, kwargs), registered=True))


def run_with_gradients(
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
    if block.recomputed_by == threading.get_ident():
        return compute(args, kwargs)  # the module has called itself; its leaves are shown already
    streamer.adopt_replaced(block)
    if not wants_gradients(block, args, kwargs):
        return streamer.run(block, compute, args, kwargs)
    if block.encloses:
        return _through_copies(streamer, block, compute, args, kwargs)
    host = [tensor.value for tensor in (*block.tensors, *block.nested)]
    return _Call(streamer, block, module, compute, args, kwargs).run(host)


class _Call(RecomputedCall):
    """One call of one block."""

    def __init__(
        self,
        streamer: Streamer,
        block: Block,
        module: nn.Module,
        compute: Compute,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__(args, kwargs)
        self._streamer = streamer
        self._block = block
        self._module = module
        self._compute = compute
        self._surroundings = Surroundings(streamer.device)
        self._versions = _versions(block)

    def compute_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._streamer.run(self._block, self._compute, args, kwargs)
        refuse_hidden_tensors(output, (args, kwargs))
        return output

    def gradients(self, inputs: Sequence[torch.Tensor], received: Gradients) -> Gradients:
        _refuse_quantized(self._block)
        refuse_second_derivatives()
        self._refuse_changed_weights()
        return self._streamer.visit(self._block, lambda held: self._gradients_in(held[0].memory, inputs, received))

    def _refuse_changed_weights(self) -> None:
        for (then, version), (now, version_now) in zip(self._versions, _versions(self._block), strict=True):
            if then is not now or version != version_now:
                raise DispatchError(
                    f"weights of {self._block.name!r} were changed between its forward and its backward, which needs "
                    "them to compute it once more: call backward before the optimizer's step"
                )

    def _gradients_in(self, memory: torch.Tensor, inputs: Sequence[torch.Tensor], received: Gradients) -> Gradients:
        """Return the gradients of the inputs, and on the host those of the weights, which lie in `memory` now."""
        block = self._block
        weights = trainable_views(block, memory)
        # The module shows one thread's leaves at a time.
        with block.recomputing(), unchanged_buffers(self._module):
            block.show(weights)
            args, kwargs = self.arguments_again(inputs)
            with torch.enable_grad(), self._surroundings.restored():
                outputs = self.tensors_of(self._compute(args, kwargs))
            # What is fetched by itself within the block takes part as the host tensor that it is.
            nested = [tensor.value for tensor in block.nested]
            with _reentrant_checkpoints_named():
                found = gradients_of(outputs, received, [*inputs, *weights, *nested])
        host = zip(found[len(inputs) :], (*block.tensors, *block.nested), strict=True)
        with DisableTorchFunctionSubclass():
            moved = [None if each is None else each.to(own.value.device, own.value.dtype) for each, own in host]
        return [*found[: len(inputs)], *moved]


def _versions(block: Block) -> list[tuple[torch.Tensor, int]]:
    """Return what changes when one of the weights of `block` is replaced or written to."""
    with DisableTorchFunctionSubclass():
        return [(t.value, version_of(t.value)) for t in (*block.tensors, *block.nested) if not t.is_buffer]


def _refuse_quantized(block: Block) -> None:
    """Raise for weights that are computed with rounded: a gradient would be that of other weights than are changed."""
    name = block.refuse_training() if isinstance(block, QuantizedBlock) else None
    if name is not None:
        raise DispatchError(
            f"{name} cannot be trained: it is quantised on its way to the device. Dispatch the model without "
            "offload_dtype to train it, or call requires_grad_(False) on its weights to train what is around them"
        )


def refuse_second_derivatives() -> None:
    """Raise in a backward whose gradients shall be differentiated again: they come without a graph."""
    if torch.is_grad_enabled():
        raise DispatchError(
            "create_graph=True: gradients through a streamed module cannot be differentiated once more, as its weights "
            "leave the device again. Map what needs it to an accelerator, or leave create_graph=True away"
        )


@contextmanager
def _reentrant_checkpoints_named() -> Iterator[None]:
    try:
        yield
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

    return streamer.run(block, run)


def trainable_views(block: Block, memory: torch.Tensor) -> list[torch.Tensor]:
    """Return fresh leaves viewing `memory` that require a gradient where the host tensors do."""
    with DisableTorchFunctionSubclass():
        leaves = [like(t.value, view.detach()) for t, view in zip(block.tensors, block.layout.views(memory))]
        # What was put in a parameter's place need not be one.
        return [leaf.requires_grad_(t.value.requires_grad) for leaf, t in zip(leaves, block.tensors)]
