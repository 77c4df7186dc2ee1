"""Gradients through a streamed block.

Between its forward and its backward a streamed block's weights leave the device, so autograd cannot save them. The
forward therefore saves only the block's inputs; the backward streams the block in again, recomputes it with gradients
enabled, and moves the gradients of its weights to the host parameters.

Device memory holds, from forward to backward, the inputs of every block; during a block's backward also its slot (the
same slots as in forward), the activations that autograd saves for this one block, and the gradients of its weights,
which move to the host together at its end. After an exception the slot is released and the module's parameters are the
host tensors again; gradients of blocks whose backward has finished remain, as after any backward that raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from ...devices.nested import iter_tensors, map_tensors
from ...errors import DispatchError
from ...profile.model.units import INDIVISIBLE
from ...profile.training.recompute import Gradients, RecomputedCall, gradients_of, other_parameter
from ..transfer.to_host import copied_to_host
from ..weights.block import Block, version_of
from ..weights.data_use import checksums
from ..weights.outside_use import is_marked, recorded_uses
from ..weights.parameters import like
from ..weights.quantized_block import QuantizedBlock
from .kept_tensors import FollowedTensors, attributes_with_tensors, refuse_gradients_of_kept, refuse_kept_in
from .replay_state import EarlierState, ReplayState, refuse_hidden_tensors, unchanged_buffers
from .slots import BlockSlot
from .streamer import Streamer, is_transformed

Compute = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def wants_gradients(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd is enabled and any weight or input of `block` requires a gradient."""
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
    """Compute `module` while `block`, its weights, is on the device, with gradients.

    Args:
        streamer: Streams the block to the device.
        block: The module's weights.
        module: The module, for its buffers.
        compute: The module's plain forward; takes args as a tuple and kwargs as a dict.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    if block.recomputed_by == threading.get_ident():
        return compute(args, kwargs)  # the module has called itself; it refers to the leaves already
    if is_transformed():
        return _run_transformed(streamer, block, compute, args, kwargs)
    streamer.adopt_replaced(block)
    resident = _trained_residents(block) if block.resident and torch.is_grad_enabled() else []
    if not resident and not wants_gradients(block, args, kwargs):
        output = streamer.run(block, compute, args, kwargs)
        if not block.encloses:
            _refuse_other_parameters(streamer, block, iter_tensors(output, registered=True))
        return output
    if block.encloses:
        return _through_copies(streamer, block, compute, args, kwargs)
    host = [tensor.value for tensor in (*block.tensors, *block.nested)]
    return _BlockCall(streamer, block, module, compute, args, kwargs, resident).run(host)


def _trained_residents(block: Block) -> list[torch.Tensor]:
    """Return the trained parameters of the block's modules that stay on the device."""
    found = {id(weight): weight for registry, key in block.resident if (weight := registry.get(key)) is not None}
    return [weight for weight in found.values() if weight.requires_grad]


def _run_transformed(
    streamer: Streamer, block: Block, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute a module with its offloaded weights, which are copied to the device in each operation.

    Raises:
        BudgetError: These copies, or the activations, pass a budget.
        DispatchError: It cannot compute with them.
    """
    _refuse_transformed(streamer, block)
    budgets = streamer.transform_budgets
    if budgets is not None:
        budgets.check_before(block, streamer.device)
    output = compute(args, kwargs)
    if budgets is not None:
        budgets.check(f"when {block.name!r} had run")
    return output


def _refuse_transformed(streamer: Streamer, block: Block) -> None:
    """Raise DispatchError for a block that cannot compute with its offloaded weights."""
    with DisableTorchFunctionSubclass():
        elsewhere = [tensor.value for tensor in block.tensors if tensor.value.device != streamer.device]
    if block.casts or isinstance(block, QuantizedBlock) or not all(is_marked(weight) for weight in elsewhere):
        raise DispatchError(
            f"{block.name!r} is streamed, and torch.vmap, torch.func and forward-mode differentiation cannot run "
            "through it as it is cast, quantised or read by a fast path: map it to an accelerator"
        )


class _BlockCall(RecomputedCall):
    """One call of one streamed block, recomputed in backward."""

    def __init__(
        self,
        streamer: Streamer,
        block: Block,
        module: nn.Module,
        compute: Compute,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        resident: list[torch.Tensor],
    ) -> None:
        super().__init__(args, kwargs)
        self._streamer = streamer
        self._block = block
        self._module = module
        self._compute = compute
        self._replay_state = ReplayState(streamer.device)
        self._borrowed: list[torch.Tensor] = resident
        """Parameters of the module that stay on the device, and offloaded weights of other blocks that this one
        computes with."""
        self._versions = _versions([*_parameters_of(block), *resident])
        self._writes_tensors = False
        self._earlier: dict[int, torch.Tensor] = {}
        """The values that the forward began with, of parameters of the block that it has written, by index."""

    def compute_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self._block
        block.earlier[id(self._earlier)] = self._earlier
        try:
            with recorded_uses() as used:
                output = self._streamer.run(block, self._compute_followed, args, kwargs)
        finally:
            del block.earlier[id(self._earlier)]
        if self._earlier:
            self._versions = _versions([*_parameters_of(block), *self._borrowed])
        if used:
            own = {id(tensor.value) for tensor in (*block.tensors, *block.nested)}
            own.update(map(id, self._borrowed))
            borrowed = {id(weight): weight for weight in used if weight.requires_grad and id(weight) not in own}
            self._borrowed = [*self._borrowed, *borrowed.values()]
            self._versions += _versions(list(borrowed.values()))
        refuse_hidden_tensors(output, (args, kwargs))
        return output

    def _compute_followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self._block
        if block.keeps_tensors is None or block.keeps_tensors:
            return self._following(args, kwargs, lambda: self._compute_observed(args, kwargs))
        output = self._compute_observed(args, kwargs)
        if not attributes_with_tensors(self._module) <= block.attributes_with_tensors:
            self._compute_again(args, kwargs)
        return output

    def _following(self, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns; gradients of tensors that it has the block keep are refused."""
        block = self._block
        passed = [tensor for tensor in iter_tensors((args, kwargs), registered=True) if tensor.requires_grad]
        own = (tensor for tensor in self._module.parameters() if tensor.requires_grad)
        with FollowedTensors([*passed, *own]) as followed:
            output = compute()
        block.keeps_tensors = refuse_gradients_of_kept(block.name, followed, self._module, (args, kwargs, output))
        block.attributes_with_tensors = attributes_with_tensors(self._module)
        return output

    def _compute_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compute once more, as the backward does, to follow what the block has begun to keep."""
        arguments = self.arguments_again(list(iter_tensors((args, kwargs), registered=True)))
        with unchanged_buffers(self._module), self._replay_state.restored():
            self._state.put_back()
            self._following(*arguments, lambda: self._compute(*arguments))

    def _compute_observed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._state = EarlierState(self._block, self._module)
        if self._takes_other_path():
            with torch.enable_grad():
                output = map_tensors(torch.Tensor.detach, self._compute(args, kwargs))
        else:
            output = self._compute(args, kwargs)
        self._state.keep_written()
        return output

    def further_weights(self) -> Sequence[torch.Tensor]:
        return self._borrowed

    def _takes_other_path(self) -> bool:
        """Whether the block holds attention of PyTorch in eval mode, which gives other last bits where gradients are
        off."""
        if self._module.training:
            return False
        if self._block.has_fast_path is None:
            self._block.has_fast_path = any(isinstance(part, INDIVISIBLE) for part in self._module.modules())
        return self._block.has_fast_path

    def refuse_written_arguments(self) -> None:
        raise DispatchError(
            f"{self._block.name!r} writes into an argument, a container that it is given, through which no gradient "
            "would flow, as it is streamed: map what hands values on so to an accelerator, or return them"
        )

    def note_written_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse to train; let a model that is evaluated compute, as nothing shows that gradients will be asked for."""
        self._writes_tensors = True
        if self._module.training:
            self._refuse_written_tensors()
        asks = torch.zeros((), requires_grad=True)
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                try:
                    _Refuse.apply(self._refuse_written_tensors, asks, tensor)
                    _ = tensor.grad_fn
                except RuntimeError:  # autograd does not let views of all kinds be written so
                    self._refuse_written_tensors()

    def _refuse_written_tensors(self) -> None:
        raise DispatchError(
            f"{self._block.name!r} writes in place into a tensor that it is given, from which its gradients would be "
            "computed again, as it is streamed: map it to an accelerator, or have it compute out of place"
        )

    def gradients(self, inputs: Sequence[torch.Tensor], received: Gradients) -> Gradients:
        if self._writes_tensors:
            self._refuse_written_tensors()
        _refuse_quantized(self._block)
        refuse_second_derivatives()
        self._refuse_changed_weights()
        return self._streamer.visit(self._block, lambda held: self._gradients_in(held[0], inputs, received))

    def _refuse_changed_weights(self) -> None:
        present = _versions([*_parameters_of(self._block), *self._borrowed])
        for (then, version), (now, version_now) in zip(self._versions, present, strict=True):
            if then is not now or version != version_now:
                raise DispatchError(
                    f"weights of {self._block.name!r} were changed between its forward and its backward, which "
                    "recomputes it with them: call backward before the optimizer's step"
                )

    def _gradients_in(self, slot: BlockSlot, inputs: Sequence[torch.Tensor], received: Gradients) -> Gradients:
        """Return the gradients of the inputs and, on the host, of the weights, whose values are in `slot`."""
        block = self._block
        weights = trainable_views(block, slot.memory)
        for index, value in self._earlier.items():
            began = block.tensors[index]
            weights[index] = like(began.value, value.to(slot.memory.device, began.device_dtype))
        # The module can refer to the leaves of one thread at a time.
        with block.recomputing(), unchanged_buffers(self._module), _shown(block, weights, slot.views[block]):
            self._state.put_back()
            args, kwargs = self.arguments_again(inputs)
            with torch.enable_grad(), self._replay_state.restored():
                outputs = self.tensors_of(self._compute(args, kwargs))
            # Tensors that are fetched separately, such as experts and adapters, take part as host tensors.
            elsewhere = [*[tensor.value for tensor in block.nested], *self._borrowed]
            sources = [*inputs, *weights, *elsewhere]
            _refuse_other_parameters(self._streamer, block, outputs, sources)
            refuse_kept_in(outputs)
            # Offloaded tensors would have autograd.grad copy its sources to one device.
            plain = DisableTorchFunctionSubclass() if any(map(is_marked, elsewhere)) else nullcontext()
            with _reentrant_checkpoints_named(), plain:
                found = gradients_of(outputs, received, sources)
            if block.keeps_views:
                slot.copy_kept(block, (args, kwargs))
        with DisableTorchFunctionSubclass():
            likes = [*[each.value for each in block.tensors], *elsewhere]
            moved = copied_to_host(found[len(inputs) :], likes, self._streamer.gradient_bytes)
        return [*found[: len(inputs)], *moved]


class _Refuse(torch.autograd.Function):
    """forward(refuse, asks, tensor) -> tensor, whose gradient `refuse` raises an error for; `asks` requires one."""

    @staticmethod
    def forward(ctx: Any, refuse: Callable[[], None], _asks: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.refuse = refuse
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_received: torch.Tensor) -> Any:
        ctx.refuse()


@contextmanager
def _shown(block: Block, tensors: list[torch.Tensor], before: list[torch.Tensor]) -> Iterator[None]:
    """Within this context, the model refers to `tensors` for those of `block`; at its end to those of `before`."""
    block.show(tensors)
    try:
        yield
    finally:
        block.show(before)


def _parameters_of(block: Block) -> list[torch.Tensor]:
    """Return the parameters of `block` on the host."""
    return [tensor.value for tensor in (*block.tensors, *block.nested) if not tensor.is_buffer]


def _versions(weights: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return weights with their version counters, to detect replacements and writes."""
    with DisableTorchFunctionSubclass():
        return [(weight, version_of(weight)) for weight in weights]


def _refuse_quantized(block: Block) -> None:
    """Raise DispatchError if quantised weights require gradients: these would be gradients of the rounded weights."""
    name = block.refuse_training() if isinstance(block, QuantizedBlock) else None
    if name is not None:
        raise DispatchError(
            f"{name} cannot be trained: it is quantised on its way to the device. Dispatch the model without "
            "offload_dtype to train it, or call requires_grad_(False) on its weights to train what is around them"
        )


def refuse_second_derivatives() -> None:
    """Raise DispatchError in a backward with create_graph=True: the gradients have no graph."""
    if torch.is_grad_enabled():
        raise DispatchError(
            "create_graph=True: gradients through a streamed module cannot be differentiated again, since its weights "
            "leave the device. Map the module to an accelerator, or leave out create_graph=True"
        )


@contextmanager
def _reentrant_checkpoints_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise DispatchError(
            "a streamed block uses checkpointing with use_reentrant=True, with which PyTorch cannot compute gradients "
            "of given tensors. Pass use_reentrant=False, or leave checkpointing off: streamed blocks save only their "
            "inputs between forward and backward anyway"
        ) from error


def _through_copies(
    streamer: Streamer, block: Block, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute with device copies that autograd saves. For a block that encloses others: saving its few own tensors is
    cheaper than recomputing all blocks inside it."""

    def run(held: list[BlockSlot]) -> Any:
        copies = []
        for tensor, view in zip(block.tensors, held[0].views[block]):
            with DisableTorchFunctionSubclass():
                copied = tensor.value.requires_grad
                copies.append(tensor.value.to(streamer.device, tensor.device_dtype) if copied else view)
        before = _states(block, copies)
        with _shown(block, copies, held[0].views[block]):
            output = compute(args, kwargs)
            _refuse_written_copies(block, copies, before)
        return held[0].copied_out(output)

    return streamer.visit(block, run)


def _refuse_written_copies(block: Block, copies: list[torch.Tensor], before: Sequence[object]) -> None:
    """Raise DispatchError if the forward has replaced any of `copies`, or written into it since its state `before`."""
    for tensor, copied, then, now in zip(block.tensors, copies, before, _states(block, copies), strict=True):
        registry, key = tensor.owners[0]
        if tensor.value.requires_grad and (registry.get(key) is not copied or then != now):
            raise DispatchError(
                f"the forward of {block.name!r} writes into its parameter {key!r}, which is trained: with gradients "
                "that is not supported while it is streamed. Map it to an accelerator, or call requires_grad_(False)"
            )


def _states(block: Block, copies: list[torch.Tensor]) -> list[object]:
    """Return values that change when one of `copies` is written."""
    return [(copied._version, checksums([copied]) if block.uses_data else None) for copied in copies]


def _refuse_other_parameters(
    streamer: Streamer, block: Block, outputs: Iterable[torch.Tensor], sources: Iterable[torch.Tensor] = ()
) -> None:
    """Raise DispatchError if gradients of `outputs` would flow to a parameter that is none of `sources`."""
    other = other_parameter(outputs, sources)
    if other is not None:
        names = (tensor.name for each in streamer.blocks for tensor in each.tensors if tensor.value is other)
        name = next((f"{name!r}" for name in names), f"a parameter of shape {tuple(other.shape)}")
        raise DispatchError(
            f"{block.name!r}, which is streamed, computes with {name}, which is neither its own nor an argument, and "
            "would get no gradient: pass it as an argument, or map the module to an accelerator"
        )


def trainable_views(block: Block, memory: torch.Tensor) -> list[torch.Tensor]:
    """Return new leaves that view `memory` and require gradients like the host tensors."""
    with DisableTorchFunctionSubclass():
        leaves = [like(t.value, view.detach()) for t, view in zip(block.tensors, block.layout.views(memory))]
        # A plain tensor may have replaced a parameter.
        return [leaf.requires_grad_(t.value.requires_grad) for leaf, t in zip(leaves, block.tensors)]
