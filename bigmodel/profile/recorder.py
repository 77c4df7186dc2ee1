"""Records a trace: watches every operation of a forward on fake tensors, and the death of every storage."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..devices import HOST
from .experts import Choice
from .kernels import run_fake
from .trace import (
    OUTSIDE,
    Allocate,
    Call,
    Enter,
    Event,
    Free,
    Held,
    Leave,
    Operation,
    Return,
    Route,
    Routed,
    Scratch,
    Trace,
)
from .work import ROUTE, Work, work_of
from .workspace import scratch_bytes


class Recorder(TorchDispatchMode):
    """Turns what runs within it into events. Enter it inside a `FakeTensorMode`.

    Args:
        known: tensors that are no activations: weights and buffers.

    Attributes:
        events: what happened, in order.
        on_host: numbers of the storages that are in the host's memory.
    """

    def __init__(self, known: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.on_host: set[int] = set()
        self._numbers: dict[int, int] = {tensor.untyped_storage()._cdata: OUTSIDE for tensor in known}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._count = 0
        self._units: list[int] = []
        self._choice: Choice | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = run_fake(func, args, kwargs or {})
        source = OUTSIDE if self._units else self._source(args)
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor, source)
        work = work_of(func, args, kwargs or {}, output, self._choice)
        if work is not None:
            self.events.append(Operation(work))
        scratch = scratch_bytes(func, args, output)
        if scratch:
            self.events.append(Scratch(scratch))
        return output

    def watch(self, tensor: torch.Tensor, source: int = OUTSIDE) -> None:
        """Book the storage of `tensor` unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        nbytes = storage.nbytes()
        if key in self._numbers or nbytes == 0:
            return
        number = self._numbers[key] = self._count
        self._count += 1
        if tensor.device.type == HOST:
            self.on_host.add(number)
        self.events.append(Allocate(number, nbytes, source))
        self._references[number] = weakref.ref(storage, self._death_of(key, number))

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage of `tensor`, as events name it; `OUTSIDE` if it is none of them."""
        return self._numbers.get(tensor.untyped_storage()._cdata, OUTSIDE)

    @contextmanager
    def call(self, fresh: Iterable[torch.Tensor], kept: Iterable[torch.Tensor]) -> Iterator[None]:
        """Book that what runs within is a call of the model by `generate`, with these inputs."""
        self.events.append(Call(sum(tensor.nbytes for tensor in fresh), sum(tensor.nbytes for tensor in kept)))
        yield
        self.events.append(Return())

    @contextmanager
    def as_maker_of(self, tensor: torch.Tensor) -> Iterator[None]:
        """Book what is made within as made by the unit that made `tensor`."""
        unit, running, number = OUTSIDE, OUTSIDE, self.number_of(tensor)
        for event in self.events:
            if isinstance(event, Enter):
                running = event.unit
            elif isinstance(event, Leave):
                running = OUTSIDE
            elif isinstance(event, Allocate) and event.storage == number:
                unit = running
        if unit == OUTSIDE:
            yield
            return
        self.events.append(Enter(unit))
        self._units.append(unit)
        yield
        self._units.pop()
        self.events.append(Leave(unit))

    def follow(self, module: nn.Module, unit: int) -> None:
        """Book when `module` starts and ends, as unit number `unit`."""

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self.events.append(Enter(unit, self._tensors((args, kwargs))))
            self._units.append(unit)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._units.pop()
            self.events.append(Leave(unit, self._tensors(output)))

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after)

    def follow_experts(self, module: nn.Module, position: int, count: int) -> None:
        """Book what is chosen of the `count` experts of `module`, those at `position` of the unit it is in."""
        arguments = inspect.signature(type(module).forward)

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            _, tokens, index, _ = arguments.bind(module, *args, **kwargs).args
            self._choice = Choice(index.shape[0], index.shape[1], count)
            self.events += [Route(position, self._choice, tokens.nbytes), Operation(Work(ROUTE))]

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._choice = None
            self.events.append(Routed())

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _tensors(self, value: Any) -> tuple[tuple[int, int], ...]:
        found = {}
        for tensor in tree_iter(value):
            if isinstance(tensor, torch.Tensor):
                number = self.number_of(tensor)
                if number != OUTSIDE:
                    found[number] = tensor.numel() * tensor.element_size()
        return tuple(found.items())

    def _source(self, args: Any) -> int:
        for tensor in tree_iter(args):
            if isinstance(tensor, torch.Tensor):
                number = self.number_of(tensor)
                if number != OUTSIDE:
                    return number
        return OUTSIDE

    def _death_of(self, key: int, number: int) -> Callable[[Any], None]:
        def died(_: Any) -> None:
            self.events.append(Free(number))
            self._references.pop(number, None)
            if self._numbers.get(key) == number:
                del self._numbers[key]

        return died


def cut(events: list[Event], marks: list[tuple[int, int]]) -> list[Trace]:
    """Cut one long recording into traces.

    Args:
        events: everything recorded.
        marks: (first, end) positions of each trace, ascending; what lies between belongs to none.

    Returns:
        One trace each, with what is alive at its start.
    """
    traces = []
    alive: dict[int, Held] = {}
    unit = OUTSIDE
    position = 0
    for first, end in marks:
        for event in events[position:first]:
            unit = _follow_life(event, unit, alive)
        traces.append(Trace(tuple(events[first:end]), tuple(alive.values())))
        for event in events[first:end]:
            unit = _follow_life(event, unit, alive)
        position = end
    return traces


def _follow_life(event: Event, unit: int, alive: dict[int, Held]) -> int:
    if isinstance(event, Allocate):
        alive[event.storage] = Held(event.storage, event.nbytes, unit)
    elif isinstance(event, Free):
        alive.pop(event.storage, None)
    elif isinstance(event, Enter):
        return event.unit
    elif isinstance(event, Leave):
        return OUTSIDE
    return unit
