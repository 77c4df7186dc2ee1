"""A recorder that replays calls of modules: one that repeats an earlier call records the same events without running.

Layers of one kind do the same at the same shapes, in a padded prompt and in one without padding, and so do the norms
and projections of one layer. A call is replayed if a module of equal structure was called with arguments of equal
shapes, and if that call did nothing but return new tensors: what it allocated is freed or returned, no unknown
condition was asked for, no weight from outside was read, and no attribute of a module was set. All other calls run.

A call with a cache of keys and values may also replace the tensors in its own layer of the cache (`CachedLayer`):
attention concatenates new keys and values to those of its layer, and the old ones are freed. Such a call is replayed
for another block if that block's layer holds tensors of equal shapes, and if the call accessed no other layer. An
access counts as one of its own layer if it is by the position that the block's modules hold (`layer_idx`), and not by
an equal number: the first block may access the first layer by its number because all blocks do.

The events are equal to those that `Recorder` records. From top to bottom: arguments of calls, with layers of caches;
recorded calls; the recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .equal_modules import POSITIONS, SCALARS, ModuleStructures
from .events import OUTSIDE, Allocate, Event, Free, Operation, Route, Routed, Scratch
from .fake_kernels import fake_view
from .recorder import Recorder
from .values import CHOSEN, VALUE, known_value

_OWN = -1
"""Role of the unit that runs, in place of its number; other units are named by the first argument that they made."""

_PLAIN_EVENTS = (Operation, Scratch, Route, Routed)
"""Events that name no storage and no unit."""

LAYERS = "layers"
"""Attribute of a cache of transformers: a list with an object for each block, whose attributes are its tensors."""


def is_cache(value: Any) -> bool:
    """Return whether an argument is a cache with layers."""
    return isinstance(getattr(value, "__dict__", {}).get(LAYERS), list) and hasattr(type(value), "get_seq_length")


class CachedLayer:
    """The layer of a cache that belongs to a block.

    Args:
        cache: the cache.
        position: which of its layers it is.

    Attributes:
        layer: the object that holds keys and values.
    """

    def __init__(self, cache: Any, position: int) -> None:
        self.cache = cache
        self.position = position
        self.layer: Any = list.__getitem__(vars(cache)[LAYERS], position)

    @classmethod
    def of(cls, cache: Any, position: int) -> CachedLayer | None:
        """Return the layer of a cache at a position; None if it has none there."""
        return cls(cache, position) if 0 <= position < len(vars(cache)[LAYERS]) else None

    @property
    def state(self) -> Mapping[str, Any]:
        """Its attributes by name."""
        return vars(self.layer)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Attributes of the cache beside its layers, by name."""
        return {name: value for name, value in vars(self.cache).items() if name != LAYERS}

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[set[int]]:
        """Yield a set to which is added what is accessed of the cache's layers within the context, other than this one
        by the position that the parts of `module` have."""
        layers = vars(self.cache)[LAYERS]
        watched = _Watched(layers)
        members = [vars(part) for part in module.modules()]
        known = [(own, name, own[name]) for own in members for name in POSITIONS if name in own]
        setattr(self.cache, LAYERS, watched)
        for own, name, position in known:
            own[name] = _OwnPosition(position)
        try:
            yield watched.others
        finally:
            for own, name, position in known:
                own[name] = position
            setattr(self.cache, LAYERS, layers)
            if isinstance(layers, _Watched):  # for a block around the module
                layers.others |= watched.others
            if len(watched) != len(layers):  # some have been added
                watched.others.add(len(layers))
                layers[:] = list.__iter__(watched)


class _OwnPosition(int):
    """The position of the running block, which its type tells from an equal number."""


class _Watched(list[Any]):
    """A list that notes which of its members are accessed, but for that at the position of the running block."""

    def __init__(self, members: list[Any]) -> None:
        super().__init__(list.__iter__(members))
        self.others: set[int] = set()

    def __getitem__(self, position: Any) -> Any:
        if type(position) is not _OwnPosition:
            self.others.add(position if isinstance(position, int) else -1)
        return super().__getitem__(position)

    def __setitem__(self, position: Any, member: Any) -> None:
        self.others.add(-1)
        super().__setitem__(position, member)

    def __iter__(self) -> Iterator[Any]:
        self.others.add(-1)
        return super().__iter__()


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a call.

    Attributes:
        module: the module that is called.
        key: value that is equal for arguments with which modules do the same, but for what caches hold.
        tensors: the tensors among them, and in its layers of caches.
        roles: role of each unit that made one of them.
        layers: its layer of each cache.
        held: what that holds, by position of the cache and attribute: equal values as in `key`.
    """

    module: nn.Module
    key: list[Any] = field(default_factory=list)
    tensors: list[FakeTensor] = field(default_factory=list)
    roles: dict[int, int] = field(default_factory=dict)
    layers: list[CachedLayer] = field(default_factory=list)
    held: dict[tuple[int, str], tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Output:
    """A new tensor that a call returns.

    Attributes:
        storage: its storage, counted from the first that the call allocates.
    """

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Given:
    """An argument that a call returns.

    Attributes:
        place: its position among the tensors of the arguments.
    """

    place: int


@dataclass(frozen=True)
class _Plain:
    """A plain value that a call returns, or sets in its layer of a cache."""

    value: Any


@dataclass(frozen=True)
class _Call:
    """What a call has recorded. Its storages are numbered from 0.

    Attributes:
        events: its events; an allocation is (storage, bytes), a freed storage its number, or -1 - the position of the
            tensor of a cache, among the arguments, that it was the memory of.
        storages: storages that it allocates.
        on_host: those of them in host memory.
        outputs: what it returns.
        kind: type of the sequence of these; None: a single tensor.
        set: (position of the cache among those given, attribute, value) of what it sets in its layer of each cache.
        sizes: bytes of the storages of its outputs and of what it sets.
        gathered: as `Recorder.gathered`, with roles in place of units.
    """

    events: tuple[Event | tuple[int, int] | int, ...]
    storages: int
    on_host: frozenset[int]
    outputs: tuple[_Output | _Given | _Plain, ...]
    kind: type | None
    set: tuple[tuple[int, str, _Output | _Plain], ...]
    sizes: Mapping[int, int]
    gathered: frozenset[frozenset[int]]


class ReplayingRecorder(Recorder):
    """A `Recorder` that replays repeated calls of the modules given to `replay_calls`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls: dict[Hashable, _Call] = {}
        self._values: dict[int, torch.Tensor] = {}  # known values of arguments, by id
        self._positions: dict[int, int | None] = {}  # by id of a module: its position in caches

    def replay_calls(self, model: nn.Module) -> None:
        """Replay repeated calls of the modules in `model`; call it before modules are followed."""
        structures = ModuleStructures(model)
        for module in model.modules():
            if "forward" not in vars(module) and type(module).forward is not nn.Module.forward:
                self._wrap_call(module, partial(self._replayed, structures, module))

    def _replayed(
        self,
        structures: ModuleStructures,
        module: nn.Module,
        method: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the result of a call of `method`, the forward of a module: replayed if it repeats one."""
        if not self._in_forward or torch.is_grad_enabled():
            return method(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            given = self._arguments(module, args, kwargs)
            known = None if given is None else structures.of(module)
        if given is None or known is None or known.number is None or not known.is_unchanged():
            given = None  # the call may free what it is given in a list or a cache
            return method(*args, **kwargs)
        held = tuple(given.held.items())
        key = known.number, tuple(given.key), held, structures.settings, self._choice, torch.get_default_dtype()
        call = self._calls.get(key)
        if call is not None:
            with torch._C.DisableTorchFunction():
                return self._replay(call, given)
        names = tuple((id(tensor), self.number_of(tensor)) for tensor in given.tensors)
        given.tensors.clear()  # for the same reason
        begin, first, choice, asked = len(self.events), self._count, self._choice, self.values.asked
        gathered, self.gathered = self.gathered, set()
        try:
            with ExitStack() as stack:
                others = [stack.enter_context(layer.watched(module)) for layer in given.layers]
                output = method(*args, **kwargs)
        finally:
            added, self.gathered = self.gathered, gathered | self.gathered
        if self.values.asked == asked and self._choice == choice and known.is_unchanged() and not any(others):
            with torch._C.DisableTorchFunction():
                after = self._arguments(module, args, kwargs)
                if after is not None and after.key == given.key and _same_layers(after, given):
                    call = self._call_since(begin, first, names, given, after, output, added)
                    if call is not None:
                        self._calls[key] = call
        return output

    @property
    def _in_forward(self) -> bool:
        """Whether the forward of one unit runs: there operations lie on its device."""
        return len(self._units) == 1 and not (self._methods or self._at_inputs or self._in_function)

    def _arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Arguments | None:
        """Return the arguments of a call of `module`; None if one is neither a plain value, nor a tensor that is
        recorded, nor a cache."""
        found = _Arguments(module, roles={self._units[-1]: _OWN})
        if self._describe(args, found.key, found) and self._describe(kwargs.values(), found.key, found):
            found.key.extend(kwargs)
            return found if found.tensors else None
        return None

    def _describe(self, values: Any, key: list[Any], found: _Arguments) -> bool:
        """Add to the key of arguments what modules do with `values` depends on; return whether that is known."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._describe_tensor(value, key, found):
                    return False
            elif kind in SCALARS:
                key += (kind, value)
            elif kind is tuple or kind is list:
                key += (kind, len(value))
                if not self._describe(value, key, found):
                    return False
            elif not is_cache(value) or not self._describe_cache(value, key, found):
                return False
        return True

    def _describe_tensor(self, value: FakeTensor, key: list[Any], found: _Arguments) -> bool:
        number = self.number_of(value)
        if number == OUTSIDE or number in self._of_weights or not _is_strided(value):
            return False
        for place, other in enumerate(found.tensors):
            if other is not value and self.number_of(other) == number:
                return False
            if other is value:
                key.append(place)
        maker = self._makers.get(number)
        role = None if maker is None else found.roles.setdefault(maker, len(found.tensors))
        found.tensors.append(value)
        where = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
        key += (*where, value.dtype, value.fake_device, value.requires_grad, role, self._value_of(value))
        return True

    def _value_of(self, tensor: FakeTensor) -> Hashable:
        """Return what is compared of the known value of a tensor: which it is, and whether it has been written."""
        value = known_value(tensor)
        if value is None:
            return None
        self._values[id(value)] = value
        return (
            id(value),
            value._version,
            value is vars(tensor).get(VALUE),
            self.values.of(tensor) is None,
            vars(tensor).get(CHOSEN),
        )

    def _describe_cache(self, cache: Any, key: list[Any], found: _Arguments) -> bool:
        position = self._position_in_caches(found.module)
        layer = None if position is None else CachedLayer.of(cache, position)
        if layer is None:
            return False
        key += (type(cache), type(layer.layer), *layer.settings)
        if not self._describe(layer.settings.values(), key, found):
            return False
        for name, value in layer.state.items():
            part: list[Any] = []
            if not self._describe([value], part, found):
                return False
            found.held[len(found.layers), name] = tuple(part)
        found.layers.append(layer)
        return True

    def _position_in_caches(self, module: nn.Module) -> int | None:
        """Return the position that all parts of a module have in caches; None if they have none, or several."""
        if id(module) not in self._positions:
            members = [vars(part) for part in module.modules()]
            found = {int(own[name]) for own in members for name in POSITIONS if isinstance(own.get(name), int)}
            self._positions[id(module)] = found.pop() if len(found) == 1 else None
        return self._positions[id(module)]

    def _call_since(
        self,
        begin: int,
        first: int,
        names: Sequence[tuple[int, int]],
        given: _Arguments,
        after: _Arguments,
        output: Any,
        gathered: set[frozenset[int]],
    ) -> _Call | None:
        """Return the call that has just run; None if it did more than to return new tensors, and to set such in its
        layers of caches.

        Args:
            begin: position of its first event.
            first: number of its first storage.
            names: `id` and storage of each tensor among its arguments.
            given: its arguments, before it ran.
            after: the same, afterwards.
            output: what it returned.
            gathered: as `Recorder.gathered`, of this call.
        """
        events: list[Event | tuple[int, int] | int] = []
        alive: dict[int, int] = {}
        places = {number: place for place, (_, number) in enumerate(names)}
        freed: set[int] = set()
        for event in self.events[begin:]:
            if isinstance(event, Allocate) and event == Allocate(event.storage, event.nbytes):
                alive[event.storage - first] = event.nbytes
                events.append((event.storage - first, event.nbytes))
            elif isinstance(event, Free) and event.storage >= first:
                del alive[event.storage - first]
                events.append(event.storage - first)
            elif isinstance(event, Free) and event.storage in places:
                freed.add(event.storage)
                events.append(-1 - places[event.storage])
            elif isinstance(event, _PLAIN_EVENTS):
                events.append(event)
            else:
                return None
        kind = type(output) if type(output) in (tuple, list) else None
        outputs = [self._output(each, first, names) for each in ((output,) if kind is None else output)]
        changed = self._set_since(first, names, given, after)
        if None in outputs or changed is None:
            return None
        made = [each for each in (*outputs, *(value for _, _, value in changed)) if isinstance(each, _Output)]
        still = {self.number_of(tensor) for tensor in after.tensors}
        if {each.storage for each in made} != alive.keys() or {number for _, number in names} - still != freed:
            return None
        if not all(unit in given.roles for units in gathered for unit in units):
            return None
        return _Call(
            tuple(events),
            self._count - first,
            frozenset(number - first for number in self.on_host if number >= first),
            tuple(each for each in outputs if each is not None),
            kind,
            tuple(changed),
            alive,
            frozenset(frozenset(given.roles[unit] for unit in units) for units in gathered),
        )

    def _set_since(
        self, first: int, names: Sequence[tuple[int, int]], given: _Arguments, after: _Arguments
    ) -> list[tuple[int, str, _Output | _Plain]] | None:
        """Return what a call has set in its layers of caches; None if it is not known how to set that again. The
        arguments are those of `_call_since`."""
        if not given.held.keys() <= after.held.keys():
            return None
        devices = {id(tensor.device) for tensor in (*given.module.parameters(), *given.module.buffers())}
        found: list[tuple[int, str, _Output | _Plain]] = []
        for (place, name), held in after.held.items():
            value = after.layers[place].state[name]
            same = given.held.get((place, name)) == held
            now = self._output(value, first, names)
            if isinstance(now, _Given) or type(value) is tuple or type(value) is list:
                if not same:
                    return None
            elif now is None or id(value) in devices:
                return None
            elif not (same and isinstance(now, _Plain)):
                found.append((place, name, now))
        return found

    def _output(self, value: Any, first: int, given: Sequence[tuple[int, int]]) -> _Output | _Given | _Plain | None:
        """Return what is known of a value that a call returned; None if it is no new tensor, no argument and not
        plain."""
        if type(value) in SCALARS:
            return _Plain(value)
        if type(value) is not FakeTensor:
            return None
        number = self.number_of(value)
        if (id(value), number) in given:
            return _Given(given.index((id(value), number)))
        if known_value(value) is not None or number < first or not _is_strided(value):
            return None
        shape, offset = tuple(value.shape), int(value.storage_offset())
        return _Output(number - first, shape, value.stride(), offset, value.dtype, value.fake_device)

    def _replay(self, call: _Call, given: _Arguments) -> Any:
        """Record a call again and return its result."""
        first, unit, begin = self._count, self._units[-1], len(self.events)
        numbers = [self.number_of(tensor) for tensor in given.tensors]
        mode = given.tensors[0].fake_mode
        memory = {number: torch.UntypedStorage(nbytes, device="meta") for number, nbytes in call.sizes.items()}

        def made(each: _Output | _Given | _Plain) -> Any:
            if isinstance(each, _Output):
                where = each.shape, each.strides, each.offset
                return fake_view(memory[each.storage], where, each.dtype, each.device, mode)
            return given.tensors[each.place] if isinstance(each, _Given) else each.value

        outputs = [made(each) for each in call.outputs]
        values = [made(each) for _, _, each in call.set]
        given.tensors.clear()
        for (place, name, _), value in zip(call.set, values, strict=True):
            setattr(given.layers[place].layer, name, value)
        freed = {event.storage for event in self.events[begin:] if isinstance(event, Free)}
        del self.events[begin:]  # tensors freed as they were replaced above: below they are freed where the call did
        self._count += call.storages
        for number in call.sizes:
            self._allocated_at[first + number] = len(self.events)
        for event in call.events:
            if isinstance(event, tuple):
                self.events.append(Allocate(first + event[0], event[1]))
            elif not isinstance(event, int):
                self.events.append(event)
            elif event >= 0:
                self.events.append(Free(first + event))
            elif numbers[-1 - event] in freed:
                self.events.append(Free(numbers[-1 - event]))
        self.on_host.update(first + number for number in call.on_host)
        units = {role: each for each, role in given.roles.items()}
        self.gathered.update(frozenset(units[role] for role in roles) for roles in call.gathered)
        for number, storage in memory.items():
            self._know(storage, first + number, unit)
        return outputs[0] if call.kind is None else call.kind(outputs)

    def _know(self, storage: torch.UntypedStorage, number: int, unit: int) -> None:
        """Watch a storage that a replayed call of a unit returns."""
        self._numbers[storage._cdata] = number
        self._places[number] = self._makers[number] = unit
        self._references[number] = self._watching(storage, number)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _same_layers(after: _Arguments, given: _Arguments) -> bool:
    pairs = zip(after.layers, given.layers, strict=True)
    return all(left.layer is right.layer for left, right in pairs)
