"""Records a trace: watches every operation of a forward on fake tensors, and the death of every storage.

What a dry run must know about single kernels: where PyTorch's fakes refuse, or differ from what runs.

What memory single kernels take for themselves while they run, beside their inputs and outputs.

The figures are those of ATen's sources, and were held against the kernel's own high-water mark of each operation.
"""

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

from ...devices import HOST, virtual
from ..model.experts import Choice
from .trace import OUTSIDE, Allocate, Call, Enter, Event, Free, Leave, Operation, Return, Route, Routed, Scratch
from .work import ROUTE, Work, work_of

aten = torch.ops.aten


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
        self._at_inputs = False
        self._choice: Choice | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = run_fake(func, args, kwargs or {})
        read = () if self._units or self._at_inputs else self._tensors((args, kwargs))
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor, read)
        work = work_of(func, args, kwargs or {}, output, self._choice)
        if work is not None:
            self.events.append(Operation(work))
        scratch = scratch_bytes(func, args, output)
        if scratch:
            self.events.append(Scratch(scratch))
        return output

    def watch(self, tensor: torch.Tensor, read: tuple[tuple[int, int], ...] = ()) -> None:
        """Book the storage of `tensor` unless it is known.

        Args:
            tensor: what came to life.
            read: storage and bytes of what was read for it, if that decides where it lies.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        nbytes = storage.nbytes()
        if key in self._numbers or nbytes == 0:
            return
        number = self._numbers[key] = self._count
        self._count += 1
        if tensor.device.type == HOST:
            self.on_host.add(number)
        self.events.append(Allocate(number, nbytes, read[0][0] if read else OUTSIDE, read[1:]))
        self._references[number] = weakref.ref(storage, self._death_of(key, number))

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage of `tensor`, as events name it; `OUTSIDE` if it is none of them."""
        return self._numbers.get(tensor.untyped_storage()._cdata, OUTSIDE)

    def call(
        self,
        run: Callable[[], Any],
        inputs: Any,
        fresh: Iterable[torch.Tensor] = (),
        kept: Iterable[torch.Tensor] = (),
    ) -> Any:
        """Run a call of the whole model, and return what it returns.

        Args:
            run: calls it.
            inputs: what with, however nested.
            fresh: those of the inputs that `generate` made for this call.
            kept: those that it keeps beside.
        """
        self.events.append(Call(self._tensors(list(fresh)), sum(tensor.nbytes for tensor in kept)))
        output = run()
        given = frozenset(number for number, _ in self._tensors(inputs))
        self.events.append(Return(self._tensors(output), given))
        return output

    @contextmanager
    def at_inputs(self) -> Iterator[None]:
        """Book what is made within as lying where the inputs are, whatever it is made of."""
        self._at_inputs = True
        yield
        self._at_inputs = False

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
            counted = getattr(getattr(module, "config", None), "_experts_implementation", None) != "batched_mm"
            self.events += [Route(position, self._choice, tokens.nbytes, counted), Operation(Work(ROUTE))]

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

    def _death_of(self, key: int, number: int) -> Callable[[Any], None]:
        def died(_: Any) -> None:
            self.events.append(Free(number))
            self._references.pop(number, None)
            if self._numbers.get(key) == number:
                del self._numbers[key]

        return died


def run_fake(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on fake tensors, also where PyTorch's own fake kernel refuses what the real one takes."""
    if func is aten._grouped_mm.default:
        return _grouped_mm(*args, **kwargs)
    output = func(*args, **kwargs)
    if func is aten.native_batch_norm.default and not args[5] and args[0].device.type != "cuda":
        # In inference only CUDA's kernel makes room for the batch's statistics.
        return output[0], *(statistic.new_empty(0) for statistic in output[1:])
    return output


def _grouped_mm(
    tokens: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any, **kwargs: Any
) -> torch.Tensor:
    """The fake kernel takes bfloat16 only; the CPU's takes every floating point dtype."""
    dtype = kwargs.get("out_dtype") or tokens.dtype
    if tokens.dim() == 2 and weights.dim() == 2:
        assert offsets is not None
        return tokens.new_empty((offsets.shape[0], tokens.shape[0], weights.shape[1]), dtype=dtype)
    return tokens.new_empty((*tokens.shape[:-1], weights.shape[-1]), dtype=dtype)


KEY_BLOCK = 512
FEWEST_IN_BLOCKS = 16
"""Channels that oneDNN keeps side by side where the processor has AVX-512; fewer are read as they lie."""


def scratch_bytes(func: Any, args: tuple[Any, ...], output: Any) -> int:
    """Return the bytes of workspace the kernel of `func` holds at its peak beside its inputs and outputs.

    Args:
        func: the operation.
        args: what it is given: (fake) tensors on the device that it is to run on.
        output: what it returned.
    """
    known = _KNOWN.get(func)
    return 0 if known is None else known(args, output)


def _flash_attention(args: tuple[Any, ...], _output: Any) -> int:
    """Every thread holds, in float32, the scores of a block of queries with a block of keys, their maxima and sums,
    and the block's output; for narrower dtypes the scores once more (ATen's FlashAttentionKernel.cpp)."""
    query, key = args[:2]
    rows, width, keys = query.shape[-2], query.shape[-1], key.shape[-2]
    block = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    keys = min(keys, KEY_BLOCK)
    numbers = block * (keys + 2 + width)
    narrow = block * keys * query.element_size() if query.element_size() < 4 else 0
    return torch.get_num_threads() * (4 * numbers + narrow)


def _safe_softmax(args: tuple[Any, ...], _output: Any) -> int:
    """Which scores are minus infinity is held in a byte each (ATen's SoftMax.cpp); a virtual accelerator's kernels
    are the host's, and hold that there."""
    scores: torch.Tensor = args[0]
    return 0 if scores.device.type == virtual.TYPE else scores.numel()


def _convolution(args: tuple[Any, ...], output: torch.Tensor) -> int:
    """On the host oneDNN copies inputs and weights into the order that it computes in; its output is copied back when
    they are gone. Convolutions in float32 that span one position, each, take them as they lie."""
    data, weight, _bias, stride, _padding, _dilation, transposed = args[:7]
    if data.device.type != HOST or transposed or not torch.backends.mkldnn.is_available():
        return 0
    if weight.shape[2:].numel() == 1 and set(stride) == {1} and data.dtype == torch.float32:
        return 0
    copied = data.nbytes if data.shape[1] >= FEWEST_IN_BLOCKS and data.is_contiguous() else 0
    return max(copied + weight.nbytes, output.nbytes)


_KNOWN: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    aten._safe_softmax.default: _safe_softmax,
    aten.convolution.default: _convolution,
}
