"""Records the events of forwards on fake tensors: each operation, and when each storage is allocated and freed.

The recorder also notes which unit of the model runs (`follow`), and on which unit's device a tensor between units lies.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import maybe_current_level
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...devices import HOST
from ...devices.nested import first_tensor, iter_tensors, map_tensors, spanned_elements
from ...quantized.experts import QuantizedExperts
from ..model.experts import ExpertsProfile, RouterChoice
from ..model.units import methods_of
from .events import (
    OUTSIDE,
    Allocate,
    Call,
    EndOfUse,
    Enter,
    Event,
    Free,
    Leave,
    Operation,
    OutsideUse,
    Return,
    Route,
    Routed,
    Scratch,
)
from .fake_kernels import run_fake
from .values import Values
from .work import CALL_ONLY, ROUTE, Work, scratch_bytes, tensors_in, work_of

_DEVICE = torch.ops.prim.device.default

_CALL_ONLY = Operation(CALL_ONLY)
"""The most frequent event."""


class Recorder(TorchDispatchMode):
    """Records the operations that run within its context as events. Enter it inside a `FakeTensorMode`.

    Args:
        known: weights and buffers, which are not recorded.
        values: the values that the forwards may read; None: those of constants, with conditions taken as true.
        device: device of the model; constants in host memory are not recorded beside an accelerator. None: record all.

    Attributes:
        events: the events so far, in order.
        combined: units whose outputs are read, between units, by operations that read tensors of other units, too. Over
            several devices such outputs must be brought to one.
        lent: units whose weights are read by operations between units, which run on the main device.
        gathered: units of which one operation reads what each has made, for each operation that reads several.
        on_host: numbers of the storages that lie in host memory.
        values: the values that the forwards may read.
    """

    def __init__(
        self, known: Iterator[torch.Tensor], values: Values | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self._only_device = device is not None and device.type != HOST
        self.values = values or Values()
        self.events: list[Event] = []
        self.on_host: set[int] = set()
        storages = [tensor.untyped_storage() for tensor in known]
        self._numbers: dict[int, int] = {storage._cdata: OUTSIDE for storage in storages}
        # A forward may replace a buffer: the next storage may get its address.
        self._known = [weakref.ref(storage, self._forgetting(storage._cdata)) for storage in storages]
        self._references: dict[int, weakref.ref[Any]] = {}
        self._allocated_at: dict[int, int] = {}  # by storage: position of the event
        self._count = 0
        self._wrapped: list[tuple[nn.Module, str, Any]] = []  # each with the method that the instance had of its own
        self._units: list[int] = []
        self._methods: set[int] = set()  # depths in `_units` of those that run another method than their forward
        self._at_inputs = False
        self._choice: RouterChoice | None = None
        self.combined: set[int] = set()
        self.lent: set[int] = set()
        self.gathered: set[frozenset[int]] = set()
        self._makers: dict[int, int] = {}  # by storage: the unit that made it, or what it was made from alone
        self._places: dict[int, int] = {}  # by storage: the unit on whose device it lies; `OUTSIDE`: the main device
        self._last_place = OUTSIDE
        self._of_weights: dict[int, tuple[int, ...]] = {}  # by storage that was made of weights alone: their units
        self._guessed: set[int] = set()  # storages between units that were made from none: their places are guessed
        self._owners: dict[int, int] = {}  # by storage of a weight: its unit, of several the first
        self._sharing: dict[int, set[int]] = {}  # by storage of a weight: all units that have it
        self._in_function = False  # whether a function runs whose weights are recorded: of its operations they are not

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, as in the class above, would wrap `__torch_dispatch__` in what keeps a compiler out of it: a dry run
        # compiles nothing, and the wrapper takes microseconds of each operation.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # read for almost every operation; it costs nothing
            return args[0].device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        operands = tensors_in(args, kwargs)
        output = self.values.run(run_fake, func, args, kwargs, operands)
        keys = [tensor.untyped_storage()._cdata for tensor in operands]
        numbers = {self._numbers.get(key, OUTSIDE) for key in keys}
        between = not self._units and not self._at_inputs
        read = self._read_between(operands) if between else ()
        alone = self._weights_alone(keys) if self._owners and not self._at_inputs else ()
        if self._units and self._of_weights and not alone:
            read = self._read_borrowed(operands)
        place = OUTSIDE if self._at_inputs else self._units[-1] if self._units else self._combine(keys)
        guessed = between and self._is_guessed(numbers)
        maker = self._maker(numbers)
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            number = self.watch(tensor, read, place, alone)
            if guessed and number != OUTSIDE:
                self._guessed.add(number)
            if maker is not None and number != OUTSIDE:
                self._makers.setdefault(number, maker)
        work = work_of(func, args, kwargs, output, self._choice, operands)
        if work is not None:
            self.events.append(_CALL_ONLY if work is CALL_ONLY else Operation(work))
        scratch = scratch_bytes(func, args, output)
        if scratch:
            self.events.append(Scratch(scratch))
        if not self._in_function and self._reads_weights(keys) and not func.is_view:
            use = self._outside_use(operands, alone)
            if use is not None:
                self.events.append(use)
        return output

    def _reads_weights(self, keys: Iterable[int]) -> bool:
        """Return whether one of the storages is that of a weight of a unit that is followed."""
        return not self._owners.keys().isdisjoint(keys)

    def begin_function(self, *arguments: Any) -> bool:
        """Record the weights that a function reads from outside their units: copies of all of them are made before it
        runs, and last while it does, also where it consists of several operations, as `torch.lstm` does.

        Args:
            arguments: its arguments, nested.

        Returns:
            Whether there are such weights. Then `end_function` must follow.
        """
        if self._in_function or not self._owners:
            return False
        operands = tensors_in(*arguments)
        if len(operands) < 2 or maybe_current_level() is not None:
            return False  # within a transform, as masks are made, tensors have no storage: its operations are recorded
        keys = [tensor.untyped_storage()._cdata for tensor in operands]
        if not self._reads_weights(keys):
            return False
        use = self._outside_use(operands, self._weights_alone(keys))
        if use is None:
            return False
        self.events.append(replace(use, lasts=True))
        self._in_function = True
        return True

    def end_function(self) -> None:
        """Record the end of a function whose weights were recorded."""
        self.events.append(EndOfUse())
        self._in_function = False

    def _maker(self, numbers: Collection[int]) -> int | None:
        """Return the unit that the results of an operation on these storages count as made by; None for none, or for
        several."""
        makers = {self._makers[number] for number in numbers if number in self._makers}
        if len(makers) > 1:
            self.gathered.add(frozenset(makers))
        if self._units:
            return self._units[-1]
        return next(iter(makers)) if len(makers) == 1 and len(numbers) == 1 else None

    def _outside_use(self, operands: Sequence[torch.Tensor], alone: tuple[int, ...]) -> OutsideUse | None:
        """Return the use of the weights among the operands of an operation that are not where it runs; None if there
        are none.

        Within a unit those are the weights that it has not brought. Between units it is none if one unit's weights are
        all that is read: that runs where they lie.
        """
        if self._units:
            weights = []
            for tensor in operands:
                key = tensor.untyped_storage()._cdata
                if key in self._owners and not self._has_brought(key):
                    weights.append((self._owners[key], tensor.nbytes))
            return OutsideUse(tuple(weights), alone=alone) if weights else None
        if self._at_inputs:
            return None
        owners = {tensor: self._owners.get(tensor.untyped_storage()._cdata, OUTSIDE) for tensor in operands}
        self.lent |= {*owners.values()} - {OUTSIDE}
        if len(set(owners.values())) < 2:
            return None
        read = self._read_between(operands)
        used = tuple((unit, tensor.nbytes) for tensor, unit in owners.items() if unit != OUTSIDE)
        return OutsideUse(used, read[0][0] if read else OUTSIDE, alone)

    def _has_brought(self, key: int) -> bool:
        """Return whether the running unit has brought a weight of its own to where it runs, as its forward does."""
        by_forward = bool(self._units) and len(self._units) not in self._methods
        return by_forward and self._units[-1] in self._sharing[key]

    def _read_between(self, operands: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        """Return (storage, bytes) of the inputs of an operation between units; what was made of weights alone, which is
        brought to the others, comes last."""
        return tuple(sorted(self._numbered(operands), key=lambda each: each[0] in self._of_weights))

    def _read_borrowed(self, operands: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        """Return (storage, bytes) of what an operation within a unit reads that was made of other units' weights alone,
        after a first member that stands for its other inputs."""
        brought = tuple(each for each in self._numbered(operands) if each[0] in self._of_weights)
        return ((OUTSIDE, 0), *brought) if brought else ()

    def _weights_alone(self, keys: Iterable[int]) -> tuple[int, ...]:
        """Return the units whose weights an operation on these storages outside them reads, if it reads nothing else
        but what was made of such."""
        units: list[int] = []
        for key in keys:
            owner = self._owners.get(key)
            of = self._of_weights.get(self._numbers.get(key, OUTSIDE), ()) if owner is None else (owner,)
            if not of or (owner is not None and self._has_brought(key)):
                return ()
            units += of
        return tuple(dict.fromkeys(units))

    def _combine(self, keys: Iterable[int]) -> int:
        """Note which units' outputs an operation on these storages combines between units, and return the place of its
        results.

        Tensors from several places are combined on the main device. What is made from none, such as positions, is made
        where the last output is, or where inputs are: nothing tells. What is combined with that is on the main device,
        too, so that both are in one place either way.
        """
        numbers = [self._numbers[key] for key in set(keys) if key in self._numbers]
        places = {self._places.get(number, OUTSIDE) for number in numbers}
        mixes = len({number in self._guessed for number in numbers if number != OUTSIDE}) > 1
        if len(places) < 2 and not (mixes and OUTSIDE not in places):
            return places.pop() if places else self._last_place
        self.combined |= places - {OUTSIDE}
        self._places.update((number, OUTSIDE) for number in numbers)
        return OUTSIDE

    def _is_guessed(self, numbers: set[int]) -> bool:
        """Return whether the place of the results of an operation on these storages between units is guessed: they are
        made from none, or from what is guessed alone, after a unit has run."""
        return self._last_place != OUTSIDE and numbers <= self._guessed

    def watch(
        self,
        tensor: torch.Tensor,
        read: tuple[tuple[int, int], ...] = (),
        place: int = OUTSIDE,
        alone: tuple[int, ...] = (),
    ) -> int:
        """Record the storage of `tensor` unless it is known, and return its number as `number_of` does.

        Args:
            tensor: a result of an operation.
            read: (storage, bytes) of the operation's inputs, if they decide the device it lies on.
            place: the unit on whose device it lies; `OUTSIDE`: the main device.
            alone: the units whose weights the operation reads, if it reads nothing else.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._numbers.get(key)
        if known is not None:
            return known
        nbytes = storage.nbytes()
        on_host = tensor.device.type == HOST
        if nbytes == 0 or (self._only_device and on_host):
            return OUTSIDE
        number = self._numbers[key] = self._count
        self._places[number] = place
        self._count += 1
        if on_host:
            self.on_host.add(number)
        self._allocated_at[number] = len(self.events)
        if alone:
            self._of_weights[number] = alone
            self.events.append(Allocate(number, nbytes, OUTSIDE, read, weights=alone))
        else:
            self.events.append(Allocate(number, nbytes, read[0][0] if read else OUTSIDE, read[1:]))
        self._references[number] = self._watching(storage, number)
        return number

    def unit_of(self, weight: torch.Tensor) -> int | None:
        """Return the unit that `weight` belongs to; None if it is no weight of a unit that is followed."""
        return self._owners.get(weight.untyped_storage()._cdata)

    def bring(self, tensor: torch.Tensor, unit: int) -> torch.Tensor:
        """Return `tensor` as brought to the device of a unit's weights by an operation between units."""
        source = self.number_of(tensor)
        if self._units or self._at_inputs or source == OUTSIDE:
            return tensor
        return self._stand_in(tensor, torch.empty_like, unit, source=source, brought_to=unit)

    def _stand_in(
        self, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor], unit: int, **how: Any
    ) -> torch.Tensor:
        """Return another tensor in the place of one, with its value and on the device of a unit.

        Args:
            tensor: the tensor.
            make: makes the other one.
            unit: the unit.
            how: more about the event of its allocation.
        """
        value, before = self.values.of(tensor), len(self.events)
        made = make(tensor)
        if value is None:
            self.values.forget(made)
        else:
            self.values.give(made, value)
        events = [event for event in self.events[before:] if isinstance(event, Allocate)]
        self.events[before:] = [replace(event, **how) for event in events]
        self._places.update((event.storage, unit) for event in events)
        self._allocated_at.update((event.storage, before + index) for index, event in enumerate(events))
        return made

    def _apart(self, value: Any, is_apart: Callable[[int], bool]) -> Any:
        """Return nested tensors with others in the place of views of weights, which may be copied to another device.

        Args:
            value: the tensors.
            is_apart: whether views of the weight with this storage are meant.
        """
        views = {
            id(tensor): self._owners[key]
            for tensor in iter_tensors(value)
            if (key := tensor.untyped_storage()._cdata) in self._owners and is_apart(key)
        }
        if not views:
            return value
        made: dict[int, torch.Tensor] = {}

        def apart(tensor: torch.Tensor) -> torch.Tensor:
            unit = views.get(id(tensor))
            if unit is None:
                return tensor
            if id(tensor) not in made:
                made[id(tensor)] = self._stand_in(tensor, _like, unit, view_of=unit)
            return made[id(tensor)]

        return map_tensors(apart, value)

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage of `tensor` in the events; `OUTSIDE` if it is not recorded."""
        return self._numbers.get(tensor.untyped_storage()._cdata, OUTSIDE)

    def call(
        self,
        run: Callable[[], Any],
        inputs: Any,
        fresh: Iterable[torch.Tensor] = (),
        kept: Iterable[torch.Tensor] = (),
    ) -> Any:
        """Run a call of the whole model and return its result.

        Args:
            run: calls the model.
            inputs: its arguments, nested.
            fresh: the inputs that `generate` creates for this call.
            kept: the inputs that it keeps after the call.
        """
        self.events.append(Call(self._tensors(list(fresh)), self._tensors(list(kept))))
        self._places.update((number, OUTSIDE) for number, _ in self._tensors(inputs))
        self._last_place = OUTSIDE
        output = run()
        given = frozenset(number for number, _ in self._tensors(inputs))
        returned = self._tensors(output)
        self.events.append(Return(returned, given))
        self._places.update((number, OUTSIDE) for number, _ in returned)
        self._last_place = OUTSIDE
        return output

    def kept_since(self, begin: int) -> int:
        """Return the bytes of storages that are alive and were allocated in the events from `begin` on."""
        made = (event for event in self.events[begin:] if isinstance(event, Allocate))
        return sum(event.nbytes for event in made if event.storage in self._references)

    @contextmanager
    def at_inputs(self) -> Iterator[None]:
        """Record storages allocated within the context as lying on the device of the inputs."""
        self._at_inputs = True
        yield
        self._at_inputs = False

    @contextmanager
    def as_unit_of(self, tensor: torch.Tensor) -> Iterator[None]:
        """Record storages allocated within the context as allocated by the unit that allocated `tensor`."""
        unit = self._unit_at(self._allocated_at.get(self.number_of(tensor), 0))
        if unit == OUTSIDE:
            yield
            return
        self.events.append(Enter(unit))
        self._units.append(unit)
        yield
        self._units.pop()
        self.events.append(Leave(unit))

    def _unit_at(self, position: int) -> int:
        """Return the unit that runs at an event; `OUTSIDE` between units."""
        for index in range(position - 1, -1, -1):
            event = self.events[index]
            if isinstance(event, Enter):
                return event.unit
            if isinstance(event, Leave):
                return OUTSIDE
        return OUTSIDE

    def abandon(self) -> None:
        """End the units that an error has left open."""
        self.events += [Leave(unit) for unit in reversed(self._units)]
        self._units.clear()
        self._methods.clear()
        self._choice = None
        self._at_inputs = self._in_function = False

    def follow(self, module: nn.Module, unit: int, is_placed: bool = True, is_lookup: bool = False) -> None:
        """Record when `module` starts and ends, by its forward or by another method that its caller gives tensors.

        Args:
            module: a module of the model.
            unit: its number in the events.
            is_placed: it has a device of its own; otherwise its operations count as operations between units.
            is_lookup: its outputs are on the main device.
        """
        if is_placed:
            for tensor in (*module.parameters(), *module.buffers()):
                key = tensor.untyped_storage()._cdata
                self._owners.setdefault(key, unit)
                self._sharing.setdefault(key, set()).add(unit)

        given: list[set[int]] = []

        def before(args: Any, kwargs: Any) -> tuple[Any, Any]:
            if is_placed and not self._units:
                args, kwargs = self._apart((args, kwargs), lambda key: unit not in self._sharing[key])
            given.append({id(tensor) for tensor in iter_tensors((args, kwargs), registered=True)})
            self.events.append(Enter(unit, self._tensors((args, kwargs))))
            if is_placed:
                self._units.append(unit)
            return args, kwargs

        def after(output: Any, args: Any, kwargs: Any) -> Any:
            known = given.pop()
            if is_placed and len(self._units) == 1:
                output = self._apart(output, lambda key: unit in self._sharing[key])
            written = [each for each in iter_tensors((args, kwargs), registered=True) if id(each) not in known]
            outputs = self._tensors((output, written))
            if isinstance(output, GeneratorType):  # runs later, between units, on the unit's device
                self.combined.add(unit)
            self.events.append(Leave(unit, outputs))
            if is_placed:
                self._units.pop()
                self._last_place = OUTSIDE if is_lookup else unit
                self._places.update((number, self._last_place) for number, _ in outputs)
            return output

        self._wrap(module, "forward", before, after)
        for name in methods_of(module) if is_placed else ():
            self._follow_method(module, unit, name)

    def _follow_method(self, module: nn.Module, unit: int, name: str) -> None:
        """Record when another method than forward starts and ends, unless the unit runs already.

        Its weights stay where they are held, and are copied for each operation. Its outputs go back to its inputs.
        """
        sources: list[int | None] = []  # of each running call: the storage of its first input; None: not followed

        def before(args: Any, kwargs: Any) -> tuple[Any, Any]:
            first = None if unit in self._units else first_tensor((args, kwargs))
            sources.append(None if first is None else self.number_of(first))
            if first is not None:
                self.events.append(Enter(unit, self._tensors((args, kwargs))))
                self._units.append(unit)
                self._methods.add(len(self._units))
            return args, kwargs

        def after(output: Any, args: Any, kwargs: Any) -> Any:
            source = sources.pop()
            if source is None:
                return output
            outputs = self._tensors(output)
            self._methods.discard(len(self._units))
            self._units.pop()
            self.events.append(Leave(unit, outputs, source))
            self._last_place = self._places.get(source, OUTSIDE)
            self._places.update((number, self._last_place) for number, _ in outputs)
            return output

        self._wrap(module, name, before, after)

    def _wrap(
        self,
        module: nn.Module,
        name: str,
        before: Callable[[Any, Any], tuple[Any, Any]],
        after: Callable[[Any, Any, Any], Any],
    ) -> None:
        """Wrap a module's forward or another method, as dispatching replaces it: some models call it without the
        module's hooks.

        Args:
            module: the module.
            name: the method.
            before: takes its arguments and returns those that it is called with.
            after: takes its output and arguments and returns what its caller gets.
        """

        def recorded(method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            args, kwargs = before(args, kwargs)
            return after(method(*args, **kwargs), args, kwargs)

        self._wrap_call(module, recorded, name)

    def _wrap_call(
        self, module: nn.Module, run: Callable[[Callable[..., Any], Any, Any], Any], name: str = "forward"
    ) -> None:
        """Replace a module's forward or another method until `unfollow`.

        Args:
            module: the module.
            run: takes the method, its positional and its keyword arguments, and returns what its caller gets.
            name: the method.
        """
        method = getattr(module, name)
        self._wrapped.append((module, name, module.__dict__.get(name)))

        @functools.wraps(method)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            return run(method, args, kwargs)

        module.__dict__[name] = recorded

    def unfollow(self) -> None:
        """Stop recording the modules that are followed."""
        while self._wrapped:
            module, name, own = self._wrapped.pop()
            if own is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = own

    def follow_experts(self, module: nn.Module, position: int, experts: ExpertsProfile) -> None:
        """Record the routing to the experts of `module`, which are at `position` in its unit.

        Follow the unit after its experts: it may be the same module.
        """
        arguments, count = inspect.signature(type(module).forward), experts.count
        shares = tuple(module.get_parameter(name).nbytes // count for name, _ in experts.slots)

        def before(args: Any, kwargs: Any) -> tuple[Any, Any]:
            _, tokens, index, weights = arguments.bind(module, *args, **kwargs).args
            self._choice = RouterChoice(index.shape[0], index.shape[1], count)
            implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
            if isinstance(module, QuantizedExperts):  # every kernel has them restored one by one
                implementation = None
            route = Route(
                position,
                self._choice,
                tokens.nbytes,
                implementation,
                tokens.element_size(),
                weights.element_size(),
                shares,
            )
            self.events += [route, Operation(Work(ROUTE))]
            return args, kwargs

        def after(output: Any, _args: Any, _kwargs: Any) -> Any:
            self._choice = None
            self.events.append(Routed())
            return output

        self._wrap(module, "forward", before, after)

    def _tensors(self, value: Any) -> tuple[tuple[int, int], ...]:
        with torch._C.DisableTorchFunction():  # no function mode is asked about shapes and storages
            return self._numbered(iter_tensors(value, registered=True))

    def _numbered(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        found: dict[int, int] = {}
        for tensor in {id(each): each for each in tensors}.values():
            number = self.number_of(tensor)
            if number != OUTSIDE:  # each view of a storage is copied by itself
                found[number] = found.get(number, 0) + spanned_elements(tensor) * tensor.element_size()
        return tuple(found.items())

    def _forgetting(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self._numbers.pop(key, None)
            self._owners.pop(key, None)
            self._sharing.pop(key, None)

        return forget

    def _watching(self, storage: torch.UntypedStorage, number: int) -> weakref.ref[Any]:
        """Return the reference to a storage of this number that records its end."""
        key = storage._cdata

        def died(_: Any) -> None:
            self.events.append(Free(number))
            self._references.pop(number, None)
            if self._numbers.get(key) == number:
                del self._numbers[key]

        return weakref.ref(storage, died)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory layout as a view, in memory of its own."""
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return found.requires_grad_(tensor.requires_grad)
