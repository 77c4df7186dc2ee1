"""Dry run of a training step on fake tensors: forward, backward and optimizer are recorded, nothing is allocated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ...arguments import shown
from ...devices import HOST, torch_device
from ...errors import PlanError
from ..model.units import find_units
from ..trace.events import Allocate, Free, Scratch
from ..trace.fake_kernels import fake_mode
from ..trace.image_inputs import image_shape
from ..trace.recorder import Recorder
from ..trace.session import ConstantsThroughHost, fake_clone
from ..trace.workload import trained_length
from .streamed_call import hold_on_host

FORWARD, LOSS, BACKWARD, REDUCING, OPTIMIZER = "forward", "loss", "backward", "reducing", "optimizer"
PHASES = (FORWARD, LOSS, BACKWARD, REDUCING, OPTIMIZER)
"""Phases of a training step. The backward is "loss" until it reaches the last block, and "reducing" from the first
gradient of a block on."""

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Called with a list of parameters."""

OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}
"""Optimizers by name; functions of parameters are accepted, too."""


def check_optimizer(optimizer: object) -> None:
    """Check that `optimizer` is a known name or a function.

    Raises:
        PlanError: it is neither a name in `OPTIMIZERS` nor a function.
    """
    known = optimizer in OPTIMIZERS if isinstance(optimizer, str) else callable(optimizer)
    if not known or isinstance(optimizer, nn.Module):
        raise PlanError(f"optimizer is {shown(optimizer)}; use one of {', '.join(OPTIMIZERS)}, or give a function")


def make_optimizer(optimizer: str | MakeOptimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of `parameters`.

    Args:
        optimizer: one of `OPTIMIZERS`, or a function of parameters that returns one.
        parameters: the parameters that it updates.

    Raises:
        PlanError: the function does not accept a list of parameters, or returns no optimizer.
    """
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    try:
        made = make(parameters)
    except TypeError as error:
        raise PlanError(f"optimizer {shown(optimizer)} does not take a list of parameters: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise PlanError(f"optimizer returned {shown(made)} for parameters; it must return a torch.optim.Optimizer")
    return made


def trainable_clone(model: nn.Module, mode: FakeTensorMode, device: torch.device, checkpointing: bool) -> Any:
    """Return a fake copy in training mode, whose parameters require gradients where those of `model` do.

    Args:
        model: any module, also on meta; not changed.
        mode: the mode the fake tensors belong to.
        device: device that the fake tensors report.
        checkpointing: blocks save only their inputs, and are recomputed in the backward.

    Raises:
        PlanError: the model does not support gradient checkpointing.
    """
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    clone: Any = fake_clone(model, mode, device, {}).train()
    for parameter, trained in zip(clone.parameters(), wanted, strict=True):
        parameter.requires_grad_(trained and parameter.is_floating_point())
    if checkpointing:
        if not getattr(clone, "supports_gradient_checkpointing", False):
            raise PlanError(f"{type(model).__name__} does not support gradient checkpointing; use checkpointing=False")
        # Renamed in transformers 5.
        getattr(clone, "activation_checkpointing_enable", clone.gradient_checkpointing_enable)()
    return clone


def training_inputs(model: nn.Module, batch_size: int, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return fake inputs and labels by name, of text (batch, tokens) or images, for a transformers model.

    Args:
        model: the model that takes them.
        batch_size: samples.
        tokens: tokens of each sample, for a text model.
        device: their device.

    Raises:
        PlanError: the model takes no labels, or neither text nor images.
    """
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if "labels" not in inspect.signature(model.forward).parameters or config is None:
        raise PlanError(f"{type(model).__name__} takes no labels; use a transformers model with a loss")
    if name == "pixel_values":
        dtype = next(p.dtype for p in model.parameters())
        labels = torch.zeros(batch_size, dtype=torch.long, device=device)
        return {name: torch.zeros(batch_size, *image_shape(config), dtype=dtype, device=device), "labels": labels}
    if name != "input_ids":
        raise PlanError(f"{type(model).__name__} takes {name!r}; training is predicted for models of text and images")
    ids = torch.zeros(batch_size, tokens, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class TrainingUse:
    """Bytes on one kind of device that persist between steps; gradients as after a backward."""

    weights: int
    buffers: int
    gradients: int
    state: int


class TrainingStep:
    """A training step on fake tensors. Its optimizer runs twice; the second time, when it has its state, is recorded.

    Attributes:
        weights, buffers, gradients, state: bytes, once `record` has run.
        uses: the same by kind of device.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int,
        context_length: int | None,
        optimizer: str | MakeOptimizer,
        checkpointing: bool,
        device_type: str,
        on_host: Collection[str] = (),
    ) -> None:
        self._device = torch_device(device_type)
        self._mode = fake_mode()
        self._model = trainable_clone(model, self._mode, self._device, checkpointing)
        with self._mode:
            self._slots = hold_on_host(self._model, on_host, self._device)
        self._blocks = tuple(f"{unit.name}." for unit in find_units(model) if unit.is_block)
        self._batch_size, self._context = batch_size, trained_length(model, context_length)
        self._optimizer = optimizer
        self.weights = _bytes(self._model.parameters())
        self.buffers = _bytes(self._model.buffers())
        self.gradients = self.state = 0

    def record(self) -> None:
        """Run the step."""
        recorder = Recorder(iter([*self._model.parameters(), *self._model.buffers(), *self._slots]))
        with self._mode, recorder, ConstantsThroughHost():
            optimizer = make_optimizer(self._optimizer, [p for p in self._model.parameters() if p.requires_grad])
            inputs = training_inputs(self._model, self._batch_size, self._context, self._device)
            self._step(optimizer, inputs, recorder)
            self.gradients = _bytes(p.grad for p in self._model.parameters() if p.grad is not None)
            kept = list(_tensors(optimizer.state))
            self.state = _bytes(tensor for tensor in kept if tensor.device.type == self._device.type)
            # Optimizer state is counted apart; Adam keeps its step counts on the host.
            self._kept = {recorder.number_of(tensor) for tensor in kept}
            self._on_host = set(recorder.on_host)
            self.uses = {kind: self._use(kind, kept) for kind in dict.fromkeys((self._device.type, HOST))}
        self._events = list(recorder.events)

    def peak(self, kind: str) -> int:
        """Return the peak bytes on one kind of device, without the slots of streamed weights."""
        use = self.uses[kind]
        beside = (self.peak_beside(phase, lambda nbytes: nbytes, kind) for phase in PHASES)
        return use.weights + use.buffers + use.state + max(beside)

    def _use(self, kind: str, kept: Collection[torch.Tensor]) -> TrainingUse:
        def there(tensors: Iterable[torch.Tensor | None]) -> int:
            return _bytes(tensor for tensor in tensors if tensor is not None and tensor.device.type == kind)

        parameters = list(self._model.parameters())
        return TrainingUse(
            there(parameters), there(self._model.buffers()), there(p.grad for p in parameters), there(kept)
        )

    def peak_beside(self, phase: str, share: Callable[[int], int], kind: str | None = None) -> int:
        """Return the peak bytes of a phase in addition to weights, buffers and optimizer state.

        Args:
            phase: one of `PHASES`.
            share: bytes of a gradient -> bytes of this rank's shard.
            kind: kind of device; None: the model's.
        """
        on_host = (kind or self._device.type) == HOST
        alive: dict[int, int] = {}
        now = highest = 0
        for position, event in enumerate(self._events):
            if isinstance(event, Allocate) and event.storage not in self._kept and self._is_there(event, on_host):
                held = share(event.nbytes) if event.storage in self._gradients else event.nbytes
                alive[event.storage] = held
                now += held
            elif isinstance(event, Free):
                now -= alive.pop(event.storage, 0)
            if position in self._phases[phase]:
                highest = max(highest, now + (event.nbytes if isinstance(event, Scratch) else 0))
        return highest

    def _is_there(self, event: Allocate, on_host: bool) -> bool:
        return self._device.type == HOST or (event.storage in self._on_host) is on_host

    def _step(self, optimizer: torch.optim.Optimizer, inputs: Mapping[str, torch.Tensor], recorder: Recorder) -> None:
        marks = [len(recorder.events)]
        with self._last_block_observed(recorder) as reached:
            loss = self._model(**inputs).loss
        if loss is None:
            raise PlanError(f"{type(self._model).__name__} returns no loss, so its training cannot be predicted")
        marks.append(len(recorder.events))
        with torch.autograd.set_multithreading_enabled(False):  # the recording modes belong to this thread
            loss.backward()
        self._gradients = {recorder.number_of(p.grad) for p in self._model.parameters() if p.grad is not None}
        marks.append(len(recorder.events))
        optimizer.step()  # makes its state
        stepping = len(recorder.events)
        optimizer.step()
        first = self._first_of_block(recorder, *marks[1:3])
        marks[2:2] = [min([*reached, first]), first]
        self._phases = {phase: range(*marks[turn : turn + 2]) for turn, phase in enumerate(PHASES[:-1])}
        self._phases[OPTIMIZER] = range(stepping, len(recorder.events))

    @contextmanager
    def _last_block_observed(self, recorder: Recorder) -> Iterator[list[int]]:
        """Run a forward within; the list receives the event position at which the backward reaches the last block."""
        reached: list[int] = []
        outputs: list[torch.Tensor] = []

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[:] = [tensor for tensor in tree_leaves(output) if getattr(tensor, "requires_grad", False)]

        handles = [self._model.get_submodule(name[:-1]).register_forward_hook(keep) for name in self._blocks]
        try:
            yield reached
        finally:
            for handle in handles:
                handle.remove()
        for tensor in outputs:
            tensor.register_hook(lambda _: reached.append(len(recorder.events)))
        outputs.clear()

    def _first_of_block(self, recorder: Recorder, begin: int, end: int) -> int:
        """Return the position between `begin` and `end` of the event that allocates the first gradient of a block."""
        gradients = {
            recorder.number_of(parameter.grad)
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and name.startswith(self._blocks)
        }
        made = (
            position
            for position in range(begin, end)
            if isinstance(event := recorder.events[position], Allocate) and event.storage in gradients
        )
        return next(made, end)


def _bytes(tensors: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors(state: Mapping[Any, Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    for kept in state.values():
        yield from (value for value in kept.values() if isinstance(value, torch.Tensor))
