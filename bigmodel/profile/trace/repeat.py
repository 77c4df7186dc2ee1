"""Repeats what a block did for the blocks after it that are alike and are called alike.

`extrapolate` runs a few of many layers; most of these are alike, too. The first block of a kind runs, and its call is
kept as a `Recorded`; for those after it its events are repeated and its results made anew, and the last runs again and
is compared. This is done only where a call is understood in full: everything that its forward may read is equal in
both calls (`described`), and what it leaves is its output, and one layer of a cache.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .extrapolate import renamed
from .recorder import Recorder
from .trace import OUTSIDE, Allocate, Event, Free, Operation, Route, Routed, Scratch
from .values import CHOSEN, COUNT, VALUE, real_tensors

FEWEST = 3
"""Blocks of a kind from which on some are repeated."""

FEW = 16
"""Numbers of a known value that are compared; two larger values are equal if they are one."""

INDICES = ("layer_idx", "layer_id", "layer_index")
"""Attributes of modules that hold the number of their layer."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, slice, type)
_UNITED = (Allocate, Free, Operation, Scratch, Route, Routed)


class NotRepeating(BaseException):
    """A block that was taken for a repetition of another did something else: the forward has to run whole.

    No `Exception`: neither a model nor an attempt may take it for an error of the forward.
    """


class _NotKnown(Exception):
    """A call has an argument, or a result, that is not understood."""


CACHES = "transformers.cache_utils"
"""The module whose classes take the number of a layer to find its keys and values."""


class _Index:
    """Stands for the number of a layer while a block runs, and notes whether anything but a cache computes with it."""

    def __init__(self, number: int, read: set[str]) -> None:
        self._number, self._read = number, read

    __class__ = property(lambda self: int)


def _noting(name: str) -> Callable[..., Any]:
    def called(self: Any, *others: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != CACHES:
            self._read.add(name)
        return getattr(int, name)(self._number, *others)

    return called


_OBJECTS = {"__new__", "__getattribute__", "__getnewargs__", "__sizeof__", "__init__", "__class__"}
for _name, _method in vars(int).items():
    if _name.startswith("__") and _name not in _OBJECTS and callable(_method):
        setattr(_Index, _name, _noting(_name))


@dataclass(frozen=True)
class _Made:
    """A tensor that a call has left: its storage, numbered as in `Recorded`, and its view of it."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Given:
    """A tensor that a call has left, and that it was given: by its place among those."""

    place: int


@dataclass(frozen=True)
class Recorded:
    """A call of a block, with storages numbered from 0 in the order of their allocation, those given `-2 - i`.

    Attributes:
        events: its events, but for those of its begin and end.
        sizes: bytes of each storage that is alive at its end.
        output: its output, with tensors as `_Made` and `_Given`.
        cached: attributes of its layer of the cache at the end, in the same way; None: it has no cache.
        gathered: makers of the operands of one operation, by their places among the makers of what was given.
        count: storages that it allocates.
        on_host: those of them that lie in host memory.
    """

    events: tuple[Event, ...]
    sizes: Mapping[int, int]
    output: Any
    cached: Any
    gathered: frozenset[frozenset[int]]
    count: int
    on_host: frozenset[int]


class _Call:
    """One call of a block: what it is given, described."""

    def __init__(
        self, recorder: Recorder, unit: int, args: Any, kwargs: Any, index: int | None, layer: bool = True
    ) -> None:
        self.recorder, self.index = recorder, index
        self._with_layer = layer  # whether the layer of the cache is described, too
        self.tensors: list[weakref.ref[FakeTensor]] = []  # what is freed within the call must not be held
        self.kept: list[Any] = []  # what the description names by its id
        self.storages: list[int] = []  # numbers of the recorder, in the order they are met
        self.units = [unit]
        self._places: dict[int, int] = {}  # by id of a tensor
        self._keys: dict[int, int] = {}  # by storage: its place among `storages`
        self._alive: list[weakref.ref[torch.UntypedStorage]] = []
        self.cache: Any = None
        self.key = self.described((args, kwargs))

    def described(self, value: Any) -> Any:
        """Return a value that is equal for two arguments that a forward cannot tell apart."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (tuple, list):
            return kind, tuple(map(self.described, value))
        if kind is dict:
            return kind, tuple((key, self.described(each)) for key, each in value.items())
        if isinstance(value, FakeTensor):
            return self._tensor(value)
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            self.kept.append(value)
            return kind, id(value)
        if any(each.__module__ == CACHES and each.__name__ == "Cache" for each in kind.__mro__):
            return self._cache(value)
        raise _NotKnown(kind)

    def _cache(self, cache: Any) -> Any:
        layers = getattr(cache, "layers", None)  # that of encoder and decoder has none of its own
        if type(layers) is not list or self.index is None or self.cache not in (None, cache):
            raise _NotKnown(type(cache))
        if self.index >= len(layers):
            raise _NotKnown(type(cache))
        self.cache = cache
        layer = cache.layers[self.index]
        self.kept.append(cache)
        beside = {name: value for name, value in vars(cache).items() if name != "layers"}
        if not self._with_layer:
            return id(cache), len(cache.layers), self.described(beside)
        return id(cache), len(cache.layers), self.described(beside), type(layer), self.described(vars(layer))

    def _tensor(self, tensor: FakeTensor) -> Any:
        place = self._place(tensor)
        if place is not None:
            return place
        if type(tensor) is not FakeTensor or tensor.requires_grad or tensor.layout is not torch.strided:
            raise _NotKnown(type(tensor))
        self._places[id(tensor)] = len(self.tensors)
        self.tensors.append(weakref.ref(tensor))
        storage = tensor.untyped_storage()
        known = storage._cdata in self._keys
        place = self._keys.setdefault(storage._cdata, len(self._keys))
        about: Any = place
        if not known:
            number = self.recorder.number_of(tensor)
            if self.recorder.is_of_weights(number):
                raise _NotKnown("it may be brought to the call's device")
            self.storages.append(number)
            self._alive.append(weakref.ref(storage))
            makers = tuple(map(self._unit, self.recorder.makers_of(number)))
            about = place, storage.nbytes(), number == OUTSIDE, number in self.recorder.on_host, makers
        values = tuple(self._value(getattr(tensor, name, None)) for name in (VALUE, COUNT, CHOSEN, "constant"))
        size = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return about, size, tensor.dtype, str(tensor.fake_device), tensor.is_conj(), tensor.is_neg(), values

    def _value(self, value: Any) -> Any:
        """Return a description of a known value: its numbers if it has few."""
        if isinstance(value, torch.Tensor) and value.numel() <= FEW:
            with real_tensors():
                return value.dtype, value.shape, str(value.tolist())
        self.kept.append(value)
        return id(value)

    def _place(self, tensor: FakeTensor) -> int | None:
        """Return the place of a tensor among those that the call was given."""
        place = self._places.get(id(tensor))
        return place if place is not None and self.tensors[place]() is tensor else None

    def _unit(self, unit: int | None) -> int | None:
        if unit is None or unit == OUTSIDE:
            return unit
        if unit not in self.units:
            self.units.append(unit)
        return self.units.index(unit)

    def left(self, value: Any, first: int) -> Any:
        """Return `value` with its tensors as `_Made` and `_Given`; storages from number `first` on are the call's."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (tuple, list):
            return kind(self.left(each, first) for each in value)
        if kind is dict:
            return {key: self.left(each, first) for key, each in value.items()}
        if not isinstance(value, FakeTensor) or type(value) is not FakeTensor:
            raise _NotKnown(kind)
        given = self._place(value)
        if given is not None:
            return _Given(given)
        if any(getattr(value, name, None) is not None for name in (VALUE, COUNT, "constant")) or value.requires_grad:
            raise _NotKnown(kind)
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise _NotKnown(kind)
        key, number = value.untyped_storage()._cdata, self.recorder.number_of(value)
        if number >= first:
            storage = number - first
        elif key in self._keys and self._alive[self._keys[key]]() is not None:
            storage = -2 - self._keys[key]
        else:
            raise _NotKnown("what it left was made elsewhere")
        device = torch.device(value.fake_device.type, value.fake_device.index)
        return _Made(storage, tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, device)

    def given_storages(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages of what the call was given, numbered as in `Recorded`."""
        found = {-2 - place: reference() for place, reference in enumerate(self._alive)}
        return {number: storage for number, storage in found.items() if storage is not None}

    def layers(self) -> Any:
        """Return what tells whether a layer of the cache other than the call's is changed."""
        if self.cache is None:
            return None
        others = (layer for place, layer in enumerate(self.cache.layers) if place != self.index)
        return [(id(layer), {name: id(value) for name, value in vars(layer).items()}) for layer in others]

    def layer(self) -> dict[str, Any] | None:
        """Return the attributes of the call's layer of the cache."""
        return None if self.cache is None else vars(self.cache.layers[self.index])


class Repeats:
    """The blocks of one recorder that may be repeated.

    Args:
        recorder: records their events.
        blocks: the blocks by unit, in the order in which they run.
    """

    def __init__(self, recorder: Recorder, blocks: Mapping[int, nn.Module]) -> None:
        self._recorder = recorder
        self._kinds: dict[int, Any] = {}
        by_kind: dict[Any, list[int]] = {}
        for unit, block in blocks.items():
            try:
                kind = signature(recorder, block)
                hash(kind)
            except (_NotKnown, TypeError):
                continue
            self._kinds[unit] = kind
            by_kind.setdefault(kind, []).append(unit)
        self._repeated = {unit for units in by_kind.values() if len(units) >= FEWEST for unit in units}
        self._last = {units[-1] for units in by_kind.values()}
        self._known: dict[Any, Recorded | None] = {}
        self._kept: list[Any] = []

    def forget(self) -> None:
        """Forget the calls so far: settings may change between two calls of the model."""
        self._known.clear()
        self._kept.clear()

    def run(self, unit: int, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what `forward` of a block returns, by a call of it or by a repetition.

        Raises:
            NotRepeating: an equal call of an equal block before did something else.
        """
        if unit not in self._repeated or torch.is_grad_enabled():
            return forward(*args, **kwargs)
        try:
            call = _Call(self._recorder, unit, args, kwargs, _index_of(block))
            key = self._kinds[unit], call.key
            hash(key)
            if not call.tensors:
                raise _NotKnown("it is given no tensor")
        except (_NotKnown, TypeError):
            return forward(*args, **kwargs)
        found = self._known.get(key)
        if found is not None and unit not in self._last:
            return self._repeat(found, call, unit)
        output, recorded = self._record(call, unit, block, forward, args, kwargs)
        if found is not None and recorded != found:  # it is the last of its kind
            raise NotRepeating(f"unit {unit} differs from one that is alike")
        if key not in self._known:
            self._known[key] = recorded
            self._kept += call.kept
        return output

    def _record(
        self, call: _Call, unit: int, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, Recorded | None]:
        recorder = self._recorder
        begin, first = len(recorder.events), recorder.count
        gathered, recorder.gathered = recorder.gathered, set()
        given = _Call(recorder, unit, args, kwargs, call.index, layer=False).key
        before, layers = _state(block), call.layers()
        try:
            with _watched_indices(block) as read:
                output = forward(*args, **kwargs)
        except Exception as error:
            raise NotRepeating(f"unit {unit} raises {type(error).__name__} where its number is watched") from error
        inside, recorder.gathered = recorder.gathered, gathered | recorder.gathered
        same = not read and before == _state(block) and layers == call.layers()
        try:
            if not same or given != _Call(recorder, unit, args, kwargs, call.index, layer=False).key:
                return output, None
            return output, self._understood(call, output, recorder.events[begin:], first, inside)
        except _NotKnown:
            return output, None

    def _understood(
        self, call: _Call, output: Any, events: Sequence[Event], first: int, gathered: set[frozenset[int]]
    ) -> Recorded:
        """Return a call that has run.

        Raises:
            _NotKnown: it did more than what is repeated.
        """
        names = {number: -2 - place for place, number in enumerate(call.storages) if number != OUTSIDE}
        names |= {number: number - first for number in range(first, self._recorder.count)}
        alive: dict[int, int] = {}
        for event in events:
            if not isinstance(event, _UNITED):
                raise _NotKnown(type(event))
            if isinstance(event, Allocate):
                if event.source != OUTSIDE or event.others or event.weights or event.brought_to is not None:
                    raise _NotKnown(event)
                alive[event.storage - first] = event.nbytes
            elif isinstance(event, Free):
                if event.storage not in names:
                    raise _NotKnown(event)
                alive.pop(event.storage - first, None)
        left = call.left(output, first), call.left(call.layer(), first)
        if {each.storage for each in _made(left) if each.storage >= 0} != alive.keys():
            raise _NotKnown("it leaves more than its output")
        freed = {names[event.storage] for event in events if isinstance(event, Free)}
        if any(each.storage in freed for each in _made(left)):
            raise _NotKnown("it leaves what it has freed")
        if any(unit not in call.units for units in gathered for unit in units):
            raise _NotKnown("it reads what units made that it was not given")
        places = frozenset(frozenset(call.units.index(unit) for unit in units) for units in gathered)
        count = self._recorder.count - first
        on_host = frozenset(number for number in range(count) if first + number in self._recorder.on_host)
        return Recorded(tuple(renamed(event, names, {}) for event in events), alive, *left, places, count, on_host)

    def _repeat(self, found: Recorded, call: _Call, unit: int) -> Any:
        """Return the output of a call that is like `found`, and append its events."""
        recorder = self._recorder
        first = recorder.count
        recorder.count += found.count
        recorder.on_host.update(first + place for place in found.on_host)
        begin = len(recorder.events)
        names = {place: first + place for place in range(found.count)}
        names |= {-2 - place: number for place, number in enumerate(call.storages)}
        given = [reference() for reference in call.tensors]
        mode = next(tensor.fake_mode for tensor in given if tensor is not None)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch._C._DisableTorchDispatch():
            for place, nbytes in found.sizes.items():
                storages[place] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        storages.update(call.given_storages())
        allocated = {}
        for position, event in enumerate(found.events):
            recorder.events.append(renamed(event, names, {}))
            if isinstance(event, Allocate):
                allocated[event.storage] = begin + position
        output = _remade(found.output, given, storages, mode)
        cached = _remade(found.cached, given, storages, mode)
        for place in found.sizes:
            recorder.adopt(storages[place], first + place, allocated[place], unit)
        ending = [names[event.storage] for event in found.events if isinstance(event, Free) and event.storage < 0]
        layer = call.layer()
        watched = recorder.disown(ending)
        given.clear()
        storages.clear()
        if layer is not None:
            layer.clear()
            layer.update(cached)
        del cached
        if any(reference() is not None for reference in watched):
            raise NotRepeating(f"unit {unit} does not free what one that is alike has freed")
        recorder.gathered |= {frozenset(call.units[place] for place in places) for places in found.gathered}
        return output


def _remade(
    left: Any, given: Sequence[FakeTensor | None], storages: Mapping[int, torch.UntypedStorage], mode: FakeTensorMode
) -> Any:
    if isinstance(left, _Given):
        return given[left.place]
    if isinstance(left, _Made):
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty(0, dtype=left.dtype, device="meta")
            tensor.set_(storages[left.storage], left.offset, left.shape, left.strides)
        return FakeTensor(mode, tensor, left.device)
    if type(left) in (tuple, list):
        return type(left)(_remade(each, given, storages, mode) for each in left)
    if type(left) is dict:
        return {key: _remade(each, given, storages, mode) for key, each in left.items()}
    return left


def _made(left: Any) -> Iterator[_Made]:
    if isinstance(left, _Made):
        yield left
    elif isinstance(left, (tuple, list, dict)):
        for each in left.values() if isinstance(left, dict) else left:
            yield from _made(each)


def _index_of(block: nn.Module) -> int | None:
    """Return the number that all modules of a block have for their layer; None if they have none, or several."""
    found = {vars(module)[name] for module in block.modules() for name in INDICES if name in vars(module)}
    return found.pop() if len(found) == 1 else None


@contextmanager
def _watched_indices(block: nn.Module) -> Iterator[set[str]]:
    """Yield what is done with the number of the layer of a block, but for a cache's reading it."""
    read: set[str] = set()
    held = [(vars(module), name) for module in block.modules() for name in INDICES if name in vars(module)]
    plain = [attributes[name] for attributes, name in held]
    for attributes, name in held:
        if type(attributes[name]) is int:
            attributes[name] = _Index(attributes[name], read)
    try:
        yield read
    finally:
        for (attributes, name), value in zip(held, plain, strict=True):
            attributes[name] = value


def _state(block: nn.Module) -> Any:
    """Return what tells whether a forward has changed a block, or an object that it refers to."""
    return [
        (id(module), [(name, id(value), _content(value)) for name, value in vars(module).items()])
        for module in block.modules()
    ]


def _content(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return [(key, id(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set)):
        return list(map(id, value))
    if isinstance(value, (nn.Module, torch.Tensor)) or not hasattr(value, "__dict__"):
        return None
    return [(name, id(each)) for name, each in vars(value).items()]


def signature(recorder: Recorder, block: nn.Module) -> Any:
    """Return a value that is equal for two blocks whose forwards do the same.

    Raises:
        _NotKnown: a part of the block is not understood.
    """
    tensors: dict[int, int] = {}
    parts = []
    for name, module in block.named_modules(remove_duplicate=False):
        own: list[tuple[Any, ...]] = []
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None:
                own.append((key, None))
                continue
            if getattr(tensor, VALUE, None) is not None or recorder.is_shared(tensor):
                raise _NotKnown(key)
            place = tensors.setdefault(id(tensor), len(tensors))
            own.append((key, place, tuple(tensor.shape), tensor.stride(), tensor.dtype, type(tensor)))
        settings = []
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules") or (key in INDICES and type(value) is int):
                continue
            if key == "forward" and recorder.is_followed(module):
                continue
            if key == "_apply":  # of the fake clone
                continue
            settings.append((key, _setting(value)))
        parts.append((name, type(module), tuple(own), tuple(settings)))
    return tuple(parts)


def _setting(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return kind, tuple(map(_setting, value))
    if isinstance(value, dict):
        return kind, tuple((key, _setting(each)) for key, each in value.items())
    if kind in (set, frozenset):
        return kind, frozenset(value)
    if kind is partial:
        return kind, id(value.func), _setting(value.args), _setting(value.keywords)
    if isinstance(value, (torch.Tensor, nn.Module, MethodType)):
        raise _NotKnown(kind)
    if getattr(kind, "__dataclass_params__", None) is not None and kind.__dataclass_params__.frozen:
        return kind, tuple(_setting(getattr(value, field.name)) for field in fields(value))
    return kind, id(value)
