"""Known values of fake tensors: those computed only from the values of inputs and constants.

Fake tensors have shapes and no values, but control flow depends on values: the positions of image tokens in a prompt,
the number of frames of a sound, whether a mask is all ones. `Values` computes such tensors for real beside the fake
ones. Values that depend on weights or on floating point samples are unknown. If a shape depends on them, the largest is
taken, so that the upper bound of memory is planned for:

- a mask of unknown value selects everything;
- a number that is counted from masks of unknown value is what it would be if they selected everything;
- the choices of a router are all the same: as many tokens as there are reach each expert that is chosen;
- an unknown condition is true on one way through the forward and false on another (`branches`).

`reading` and `read_as_real` let models read known values as they read those of real tensors.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from .branches import Answers
from .work import tensors_in

aten = torch.ops.aten

LARGEST = 2**20
"""Elements of the largest tensor whose value is computed: masks of long prompts would take too long."""

VALUE = "_bigmodel_value"
"""Attribute of a fake tensor that holds its value: a tensor on the host."""

COUNT = "_bigmodel_count"
"""Attribute of a fake tensor whose value is unknown: its value if unknown masks selected everything, and if choices of
the largest, as those of routers, were all the same."""

CHOSEN = "_bigmodel_chosen"
"""Attribute of a fake tensor whose `COUNT` comes from choices."""

_UNDEFINED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

_EQUALITIES = {aten.eq.Tensor, aten.eq.Scalar}

_INTEGERS = {torch.int32, torch.int64}

_PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Types of tensors whose operations no subclass has anything to do with."""

Call = Callable[[Any, tuple[Any, ...], Mapping[str, Any], list[torch.Tensor]], Any]
"""Runs an operation on fake tensors: the last argument are the tensors among its arguments."""


def real_tensors() -> AbstractContextManager[None]:
    """Return the context in which operations run for real within a dry run, and are not recorded."""
    return _disable_current_modes()


def _all_choose_the_first(chosen: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the indices of a choice of the largest along `dim`, of the shape of `chosen`, if these came first."""
    with real_tensors():
        shape = [*chosen.shape]
        shape.append(shape.pop(dim))
        return torch.arange(shape[-1]).expand(shape).movedim(-1, dim).contiguous()


def _on_host(value: Any, of: Callable[[torch.Tensor], Any]) -> Any:
    """Return an argument with `of` each tensor in it in its place, and of each device the host."""
    if isinstance(value, torch.Tensor):
        return of(value)
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(_on_host(member, of) for member in value)
    return torch.device("cpu") if kind is torch.device and value.type != "meta" else value


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a fake tensor, or what it counts if its value is unknown; None if nothing is known of it."""
    own = vars(tensor)
    found: torch.Tensor | None = own.get(VALUE, own.get(COUNT))
    return found


class UnknownValue(Exception):
    """A forward reads a number that depends on weights or on floating point samples."""


class Values:
    """Runs operations on fake tensors and computes the values that are known beside them.

    Args:
        answers: the values of unknown conditions; None: all are true.

    Attributes:
        answers: the same; None until one is read.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        self.answers = answers
        self._overwritten: dict[int, torch.Tensor] = {}  # by storage: values into which unknown ones were written

    @property
    def asked(self) -> int:
        """How often an unknown condition was read."""
        return 0 if self.answers is None else self.answers.asked

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor on the host; None if it is unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        value: torch.Tensor | None = tensor.__dict__.get(VALUE)
        if value is not None and self._overwritten and value.untyped_storage()._cdata in self._overwritten:
            return None
        return value

    def give(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the value of a fake tensor of the same shape."""
        setattr(tensor, VALUE, value)

    def forget(self, tensor: torch.Tensor) -> None:
        """Mark the value of a fake tensor as unknown."""
        tensor.__dict__.pop(VALUE, None)

    def run(
        self,
        call: Call,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        read: list[torch.Tensor] | None = None,
    ) -> Any:
        """Return the result of `call(func, args, kwargs, read)` on fake tensors, with its value where that is known.

        Args:
            call: runs the operation on fake tensors.
            func: the operation.
            args: its positional arguments.
            kwargs: its keyword arguments.
            read: the tensors among its arguments, in order; None: they are looked for.

        Raises:
            UnknownValue: the result is a number that depends on unknown values.
        """
        if read is None:
            read = tensors_in(args, kwargs)
        self._adopt_constants(read)
        try:
            output = call(func, args, kwargs, read)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            return self._by_value(call, func, args, kwargs, error)
        tensors = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        if tensors and all(tensor.numel() <= LARGEST for tensor in tensors):
            value = self._compute(func, args, kwargs, read, output)
            if value is None:
                self._count(func, args, kwargs, read, output)
            else:
                self._remember(output, value)
        elif func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        return output

    def _adopt_constants(self, read: list[torch.Tensor]) -> None:
        """Take over the constants that PyTorch attaches to fake tensors: its own propagation fails if one is moved to
        another device."""
        for leaf in read:
            if isinstance(leaf, FakeTensor) and leaf.constant is not None:
                if getattr(leaf, VALUE, None) is None:
                    self.give(leaf, leaf.constant)
                leaf.constant = None

    def _compute(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        read: list[torch.Tensor],
        output: Any = None,
    ) -> Any:
        """Return the value of an operation's result, of which `output` is the fake; None if it is unknown."""
        if func in _UNDEFINED and output.dtype in _INTEGERS:  # written before it is read
            with real_tensors():
                return torch.zeros(output.shape, dtype=output.dtype)
        known = all(self.of(tensor) is not None for tensor in read)
        if not known or func in _UNDEFINED or torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.is_mutable:
                self._forget_written(func, args, kwargs)
            return None
        return self._run_real(self.of, func, args, kwargs)

    def _run_real(self, of: Callable[[torch.Tensor], Any], func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation on the values that `of` returns; None if the host has no such kernel."""
        real = [_on_host(value, of) for value in args]
        by_name = {name: _on_host(value, of) for name, value in kwargs.items()}
        are_plain = all(type(tensor) in _PLAIN for tensor in tensors_in(real, by_name))
        # For plain tensors PyTorch's guard does the same, in a tenth of the time.
        with torch._C._DisableTorchDispatch() if are_plain else real_tensors():
            try:
                return func(*real, **by_name)
            except NotImplementedError:
                return None

    def _count(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], read: list[torch.Tensor], output: Any
    ) -> None:
        """Remember what an operation counts from masks, if these selected everything, and from choices, if all of them
        were the same: then nothing could be chosen more often."""
        if func is aten.topk.default and output[1].dim():
            setattr(output[1], COUNT, _all_choose_the_first(output[1], args[2] if len(args) > 2 else -1))
            setattr(output[1], CHOSEN, True)
            return
        if not all(map(self._is_counted, read)) or func in _UNDEFINED or func._schema.is_mutable:
            return
        chosen = any(getattr(tensor, CHOSEN, False) for tensor in read)
        masks = any(tensor.dtype == torch.bool for tensor in tensors_in(output))
        if not read or (masks and not (chosen and func in _EQUALITIES)):
            return
        counted = self._run_real(self._count_in, func, args, kwargs)
        if counted is not None:
            for fake, real in zip(tree_iter(output), tree_iter(counted), strict=True):
                setattr(fake, COUNT, real)
                setattr(fake, CHOSEN, chosen)

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        """Return whether `_count_in` has a value of a tensor, without making it."""
        if COUNT in tensor.__dict__ or self.of(tensor) is not None:
            return True
        return tensor.dtype == torch.bool and tensor.numel() <= LARGEST

    def _count_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor; that of an unknown mask selects everything."""
        value = self.of(tensor)
        if value is not None:
            return value
        counted: torch.Tensor | None = tensor.__dict__.get(COUNT)
        if counted is None and tensor.dtype == torch.bool and tensor.numel() <= LARGEST:
            with real_tensors():
                return torch.ones(tensor.shape, dtype=torch.bool)
        return counted

    def _forget_written(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        named.update(kwargs)
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for leaf in tree_iter(named.get(argument.name)):
                value = getattr(leaf, VALUE, None)
                if value is not None:
                    self._overwritten[value.untyped_storage()._cdata] = value

    def _remember(self, output: Any, value: Any) -> None:
        if isinstance(output, FakeTensor) and isinstance(value, torch.Tensor):
            self.give(output, value)
            return
        for fake, real in zip(tree_iter(output), tree_iter(value), strict=True):
            if isinstance(fake, FakeTensor) and isinstance(real, torch.Tensor):
                self.give(fake, real)

    def _by_value(
        self, call: Call, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
    ) -> Any:
        """Return the result of an operation whose shape or number depends on values."""
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            return self._number(func, args)
        if func is aten.index.Tensor:
            return self.run(call, func, (args[0], self._positions(args[1])), kwargs)
        if func is aten.masked_select.default:
            shape = list(torch.broadcast_shapes(args[0].shape, args[1].shape))
            data, mask = (self.run(call, aten.expand.default, (tensor, shape), {}) for tensor in args)
            return self.run(call, aten.index.Tensor, (data, self._positions([mask])), kwargs)
        if func is aten.nonzero.default:
            return self._fake(self._selected(args[0]), args[0].device)
        if func is aten._pack_padded_sequence.default:
            return self._packed_sequence(*args)
        read = tensors_in(args, kwargs)
        value = self._compute(func, args, kwargs, read)
        if value is None:
            raise UnknownValue(f"{func} reads values that are not known") from error
        device = read[0].device
        return tree_map(lambda real: self._made(real, device) if isinstance(real, torch.Tensor) else real, value)

    def _number(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return a number read from tensors, or whether two tensors are equal."""
        values = [self.of(tensor) for tensor in args]
        if all(value is not None for value in values):
            with real_tensors():
                return func(*values)
        if func is aten.equal.default or args[0].dtype == torch.bool:
            self.answers = self.answers or Answers()
            return self.answers.ask()
        counted = self._count_in(args[0])
        if counted is not None:
            with real_tensors():
                return counted.item()
        raise UnknownValue(
            f"a number of dtype {str(args[0].dtype).removeprefix('torch.')} is read, and it is not known"
        )

    def _selected(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the positions that a mask selects: int64, (count, dimensions); of unknown values all, or those that
        equal choices select."""
        value = self.of(mask)
        if value is None and getattr(mask, CHOSEN, False):
            value = getattr(mask, COUNT)
        with real_tensors():
            return (torch.ones(mask.shape, dtype=torch.bool) if value is None else value).nonzero()

    def _packed_sequence(
        self, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements of padded sequences, packed, and how many sequences reach each step: a real tensor, as
        recurrent layers read it past any dispatch. Sequences of unknown lengths have no padding."""
        known = self.of(lengths)
        with real_tensors():
            if known is None:
                known = torch.full(lengths.shape, padded.shape[1 if batch_first else 0])
            _, sizes = torch._pack_padded_sequence(torch.empty(padded.shape[:2]), known, batch_first)
            elements = int(sizes.sum())
        packed = torch.empty((elements, *padded.shape[2:]), dtype=padded.dtype, device=padded.device)
        return packed, sizes

    def _positions(self, indices: Any) -> list[torch.Tensor | None]:
        """Return indices with each mask among them replaced by the positions that it selects."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            selected = self._selected(index)
            with real_tensors():
                columns = selected.unbind(1)
            found += [self._fake(column, index.device) for column in columns]
        return found

    def _made(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a fake tensor with the storage of a real result, which may be larger than the result: kernels that do
        not know how much they will find allocate the most."""
        elements = real.untyped_storage().nbytes() // real.element_size()
        whole = torch.empty(elements, dtype=real.dtype, device=device)
        fake = whole.as_strided(real.shape, real.stride(), real.storage_offset())
        if real.numel() <= LARGEST:
            self.give(fake, real)
        return fake

    def _fake(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        if real.numel() <= LARGEST:
            self.give(fake, real)
        return fake


@contextmanager
def read_as_real() -> Iterator[None]:
    """Let models read the values of fake tensors as they read those of real ones.

    Models of transformers take fake tensors for those of a compiler by default, and make masks also where nothing is
    masked. PyTorch makes the list of a fake tensor's numbers by an operation for each, which takes seconds for a mask
    of a long prompt: where the numbers are known (`reading`), they are listed at once.
    """
    global _reading
    library: Any = sys.modules.get("transformers.utils.import_utils")
    replaced: list[tuple[Any, str, Any]] = [(FakeTensor, "tolist", _listed)]
    if library is not None and hasattr(library, "is_fake_tensor"):
        replaced.append((library, "is_fake_tensor", _is_not_read))
    with _lock:
        _reading += 1
        for owner, name, other in replaced if _reading == 1 else ():
            _before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, other)
    try:
        yield
    finally:
        with _lock:
            _reading -= 1
            while _before and not _reading:
                setattr(*_before.pop())


@contextmanager
def reading(values: Values) -> Iterator[None]:
    """Let `tolist` of fake tensors read `values` in this thread."""
    before, _read.values = getattr(_read, "values", None), values
    try:
        yield
    finally:
        _read.values = before


_lock = threading.Lock()
_read = threading.local()
_reading = 0
_before: list[tuple[Any, str, Any]] = []
_list_by_operations = FakeTensor.tolist


def _is_not_read(_tensor: Any) -> bool:
    return False


def _listed(tensor: FakeTensor) -> Any:
    values: Values | None = getattr(_read, "values", None)
    known: torch.Tensor | None = None if values is None else values.of(tensor)
    if known is None:
        return _list_by_operations(tensor)
    with real_tensors():
        return known.tolist()
