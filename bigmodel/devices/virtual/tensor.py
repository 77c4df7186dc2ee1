"""The tensor of a virtual accelerator: a wrapper around a CPU tensor, with the rules of a real device.

Every operation runs on the wrapped CPU tensors. The wrapper adds the rules of an accelerator: outputs count against the
device's memory, an operation must not mix tensors of different devices, and copies to and from the host pass over the
device's link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from types import NoneType
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from . import late, streams, strict, traced
from .arena import Allocation, Arena
from .clock import ComputeClock, sleep_until
from .link import VirtualLink
from .pinned import pinned_memory
from .postponing import GuardedHook, postponed
from .races import Access, detector
from .roles import tensors_in
from .streams import TYPE
from .traits import Traits, traits_of

_COPY, _TO_COPY, _NUMBER = (
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._local_scalar_dense.default,
)

_OWN = {"held", "_allocation", "_index", "_metadata", "_span", "_is_param"}

_WITHOUT_TENSORS = {NoneType, bool, int, float, torch.dtype}
"""Types of arguments that hold no tensor: to ask whether they are tensors takes longer than a look at their type."""


class Board:
    """The arenas, links and clocks of all virtual accelerators of this process."""

    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        self.links: list[VirtualLink] = []
        self.clocks: list[ComputeClock] = []
        self.strict = False
        """Whether accelerators whose links take no time are strict."""

    def arena(self, index: int) -> Arena:
        """Return the memory of device `index`; RuntimeError if there is no such device."""
        if not 0 <= index < len(self.arenas):
            raise RuntimeError(f"{TYPE}:{index} does not exist; {len(self.arenas)} virtual accelerators are enabled")
        if self.strict and streams.is_in_bad_fork():
            raise RuntimeError(
                f"cannot use {TYPE}:{index} in a forked process, as its parent had used it before: spawn processes, or "
                "fork them earlier"
            )
        return self.arenas[index]

    def is_timed(self, index: int | None) -> bool:
        """Whether device `index` computes at a set speed."""
        return index is not None and index < len(self.clocks) and self.clocks[index].flops is not None

    def launch(self, index: int) -> None:
        """Hold the calling thread as long as a launch on device `index` takes it, if there is such a device."""
        if index < len(self.links) and self.links[index].launch_cost:
            self.links[index].launch()


board = Board()
_data: Any = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]


with_engine_thread: set[int] = set()
"""Indices of devices whose backward passes may run in autograd's own thread for them, as those on a GPU do."""


def keep_backward_in_this_thread(index: int) -> None:
    """Make backward passes of the calling thread, which uses device `index`, run in it, for tensors of all devices.

    Autograd creates one thread per device at the first backward pass of a process and ignores devices added later; of a
    device type written in Python it supports the device 0 only.
    """
    if index not in with_engine_thread and torch._C._is_multithreading_enabled():
        torch.autograd.set_multithreading_enabled(False)


@cache
def _device(index: int) -> torch.device:
    return torch.device(TYPE, index)


class VirtualTensor(torch.Tensor):
    """A tensor that reports the device ``virtual:N`` and keeps its elements in a CPU tensor, `held`.

    Attributes keep what each operation asks, since asking PyTorch takes ten times as long: the index of the device, the
    metadata of `held`, and the bytes that it spans (None: not known yet).
    """

    held: torch.Tensor
    _allocation: Allocation | None
    _index: int
    _metadata: late.Metadata
    _span: tuple[int, int] | None = None

    @staticmethod
    def __new__(
        cls,
        held: torch.Tensor,
        index: int | None = None,
        allocation: Allocation | None = None,
        *,
        requires_grad: bool = True,
    ) -> VirtualTensor:
        if index is None:  # libraries copy a parameter by `type(parameter)(data, requires_grad=...)`
            parameter: Any = torch.nn.Parameter(held, requires_grad)
            return parameter
        if held.layout is not torch.strided or held.is_nested:
            raise NotImplementedError(f"{TYPE} accelerators have no sparse and no nested tensors")
        if allocation is None and not traced.is_traced(held):
            allocation = board.arena(index).claim(held)
        if torch._C._is_multithreading_enabled():
            keep_backward_in_this_thread(index)
        metadata = size, strides, dtype = held.size(), held.stride(), held.dtype
        if dtype.is_complex:
            _Operation.may_be_complex = True
        # By position, since keywords take PyTorch twice the time.
        wrapper: VirtualTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides, held.storage_offset(), dtype=dtype, device=_device(index)
        )
        if held.is_conj():
            torch._C._set_conj(wrapper, True)
        if held.is_neg():
            torch._C._set_neg(wrapper, True)
        wrapper.held = held
        wrapper._allocation = allocation
        wrapper._index = index
        wrapper._metadata = metadata
        return wrapper

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.held.detach())[:-1] + f", device='{self.device}')"

    def __format__(self, spec: str) -> str:
        """Format a tensor of no dimension as its number, which PyTorch does not do for subclasses."""
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    @property
    def data(self) -> torch.Tensor:
        """The same elements, apart from autograd."""
        return _data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take over the elements of `value`; PyTorch's own setter takes over only the shape."""
        _data.__set__(self, value)
        if isinstance(value, VirtualTensor):
            self.held, self._allocation = value.held, value._allocation
            self._index, self._metadata, self._span = value._index, value._metadata, None

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of its memory that it spans: the first, and the one after the last; equal if it has no element."""
        found = self._span
        if found is None:
            found = self._span = strict.span(self.held)
        return found

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that `stream` uses this memory, as CUDA's must be told."""
        strict.record_stream(self, stream)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Have `hook` called with this tensor's gradient; the backward pass raises its errors after its last node."""
        return super().register_hook(GuardedHook(hook))

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Have `hook` called once a gradient was added to this tensor's, with its errors as those of other hooks."""
        return super().register_post_accumulate_grad_hook(GuardedHook(hook))

    def tolist(self) -> Any:
        """Return the elements as nested lists of numbers; PyTorch does not support this for wrapper subclasses."""
        return self.detach().cpu().tolist()

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """Lets ``Module.to`` swap a parameter's content in place, so that tied parameters stay tied."""
        return ["held"], self.device.index

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor], index: int, size: torch.Size, stride: tuple[int, ...]
    ) -> VirtualTensor:
        return VirtualTensor(parts["held"], index)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        streams.current_stream(self.device.index).finish()
        return VirtualTensor, (self.held, self.device.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        index = self.device.index
        if not traced.is_traced(self.held):
            streams.current_stream(index).finish()
        copied: VirtualTensor = super().__deepcopy__(memo)
        if not traced.is_traced(copied.held):  # the elements are copied as an attribute is: not by an operation
            copied._allocation = board.arena(index).claim(copied.held)
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        if traced.is_begun():
            mode = traced.mode_of(VirtualTensor, args, kwargs)
            if mode is not None:
                return traced.run_traced(mode, VirtualTensor, func, args, kwargs)
        if traits.is_decomposed and (torch.is_inference_mode_enabled() or _has_inference_tensor(args)):
            # Composite operations are not decomposed yet here, since autograd does not run. ATen's own decomposition
            # calls the kernels of a device; some of those in Python compute with many temporary tensors.
            if traits.is_composite:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
            return func.decompose(*args, **kwargs)
        if traits.is_list and _are_mixed(args):
            # As on CUDA: lists with tensors of several devices are gone through tensor by tensor.
            return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if traits.sparse is not None:
            _refuse_sparse_gradients(traits, args, kwargs)
        call = _Operation(traits, args, kwargs)
        try:
            output = _over_link(call) if traits.copies else call.run()
        except Exception as error:
            if call.target is None or not postponed(error):
                raise
            output = _undefined_output(func, call.held_args, call.held_kwargs)
        return output if call.target is None else call.wrap(output, call.target)


class _Operation:
    """One running operation.

    Attributes:
        traits: What is known of the operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        held_args: `args` with the host's tensors in the place of virtual ones.
        held_kwargs: `kwargs`, likewise.
        wrappers: The virtual tensors among them, by the ids of the host's tensors.
        index: Their device.
        target: The device of its outputs; None: they are not on a virtual accelerator.
        reads_host: Whether a tensor of the host is among them.
        is_complex: Whether one of the virtual tensors has complex elements.
        may_be_complex: Whether this process has made any that has; until then none is asked, which takes time.
    """

    may_be_complex = False

    __slots__ = (
        "args",
        "held_args",
        "held_kwargs",
        "host",
        "index",
        "is_complex",
        "kwargs",
        "reads_host",
        "target",
        "traits",
        "wrappers",
    )

    def __init__(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.traits = traits
        self.args = args
        self.kwargs = kwargs
        self.wrappers: dict[int, VirtualTensor] = {}
        self.index: int | None = None
        self.host: torch.Tensor | None = None
        self.reads_host = False
        self.is_complex = False
        self.held_args: Sequence[Any] = self._unwrap_all(args)
        self.held_kwargs = kwargs
        self.target: int | None = self.index
        if kwargs:
            self.held_kwargs = {name: self._unwrap(value) for name, value in kwargs.items() if name != "device"}
            self.target = self.index
            if "device" in kwargs:
                given = kwargs["device"]
                on_host = given is None or torch.device(given).type == TYPE
                self.held_kwargs["device"] = torch.device("cpu") if on_host else given
                if given is not None:
                    self.target = _virtual_index(torch.device(given))
        if traits.copies and traits.func is _COPY and not isinstance(args[0], VirtualTensor):
            self.target = None

    def _unwrap(self, value: Any) -> Any:
        if isinstance(value, VirtualTensor):
            held, index = value.held, value._index
            if index != self.index:
                if self.index is None:
                    self.index = index
                elif not self.traits.may_mix:
                    self._refuse(f"{TYPE}:{self.index}", f"{TYPE}:{index}")
            if self.host is not None and not self.traits.may_mix:
                self._refuse(f"{TYPE}:{index}", str(self.host.device))
            if self.may_be_complex and held.is_complex():
                self.is_complex = True
            self.wrappers[id(held)] = value
            return held
        if isinstance(value, torch.Tensor):
            self.reads_host = True
            if value.dim() > 0:
                self.host = value
                if self.index is not None and not self.traits.may_mix:
                    self._refuse(f"{TYPE}:{self.index}", str(value.device))
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(self._unwrap_all(value))
        return value

    def _unwrap_all(self, values: Iterable[Any]) -> list[Any]:
        return [value if type(value) in _WITHOUT_TENSORS else self._unwrap(value) for value in values]

    def run(self) -> Any:
        """Compute it, now or later; return what the kernel returns."""
        traits, index = self.traits, self.index
        if index is None:
            return self.compute()
        if traits.roles is not None:
            board.launch(index)
        if traits.is_product:
            board.arena(index).need_workspace()
            if board.is_timed(index):
                stream, (left, right) = streams.current_stream(index), traits.factors
                stream.ready = board.clocks[index].compute(stream.ready, (self.args[left], self.args[right]))
        elif traits.waits and board.is_timed(index) and not (traits.is_indexed and not late.has_masks(self.args[1])):
            sleep_until(streams.current_stream(index).ready)
        if not board.strict or not (traits.touches or self.is_complex):
            return self.compute()
        with detector.lock:
            launched = strict.launch(traits, self.args, self.kwargs, self.held_args, self.wrappers, index)
            if late.is_late(index):
                if board.arena(index).strict and not (traits.host_outputs or traits.sets or self.is_complex):
                    return self.queue(launched)
                streams.current_stream(index).catch_up()
        return self.compute()

    def compute(self) -> Any:
        """Compute it now."""
        if self.is_complex:
            with _conjugation():
                return self.traits.kernel(*self.held_args, **self.held_kwargs)
        return self.traits.kernel(*self.held_args, **self.held_kwargs)

    def queue(self, launched: Access | None, index: int | None = None) -> Any:
        """Queue it, as `launched`, on the stream of device `index`; None: of its own. The detector's lock is held."""
        index = self.index if index is None else index
        assert index is not None
        return late.queue(
            self.traits, self.held_args, self.held_kwargs, self.wrappers, self.reads_host, index, launched
        )

    def wrap(self, output: Any, index: int) -> Any:
        """Return an output of the kernel as one of device `index`."""
        if isinstance(output, torch.Tensor):
            known = self.wrappers.get(id(output))
            if known is None:
                return output if isinstance(output, VirtualTensor) else self._new(output, index)
            if not self.traits.keeps_metadata:
                known._span = None
                if self.traits.sets:
                    known._allocation = board.arena(index).claim(output)
                if known.shape != output.shape or known.stride() != output.stride():
                    known.data = VirtualTensor(output, index)  # an operation such as squeeze_
            return known
        if isinstance(output, (list, tuple)):
            kept = self.traits.host_outputs
            return type(output)(
                [item if position in kept else self.wrap(item, index) for position, item in enumerate(output)]
            )
        return output

    def _new(self, held: torch.Tensor, index: int) -> VirtualTensor:
        if not self.traits.is_view:
            return VirtualTensor(held, index)
        # A view has its base's memory, also if the accelerator has been taken away from under it.
        bases = list(self.wrappers.values())
        shared = bases[0]._allocation if bases else None
        if not torch.is_inference_mode_enabled() or True in [base.is_inference() for base in bases]:
            return VirtualTensor(held, index, shared)
        # A view is an inference tensor exactly if its base is one, in any mode, unless it has another dtype.
        if self.traits.func is torch.ops.aten.view.dtype:
            return VirtualTensor(held, index, shared)
        with torch._C._InferenceMode(False):  # what `torch.inference_mode` is made of, in a tenth of its time
            return VirtualTensor(held, index, shared)

    def _refuse(self, one: str, other: str) -> None:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! "
            f"(when running {self.traits.func})"
        )


def _virtual_index(device: torch.device) -> int | None:
    """Return the index of a virtual accelerator; None for another device."""
    if device.type != TYPE:
        return None
    return device.index if device.index is not None else 0


def _conjugation() -> AbstractContextManager[object]:
    """Return a context in which kernels may use conjugate and negative views of complex tensors.

    PyTorch resolves these above `__torch_dispatch__`, and within it no more: a kernel that conjugates in between would
    compute with elements that are not conjugated.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.Conjugate, DispatchKey.Negative):
        excluded = excluded.remove(key)
    guard: AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard


def _over_link(call: _Operation) -> Any:
    """Run an operation that may copy, over the link if it does so between the host and a virtual accelerator."""
    func, args = call.traits.func, call.args
    into: torch.Tensor | None = None
    from_ = args[0]
    if func is _COPY:
        into, from_ = args[0], args[1]
    elif func is not _TO_COPY and func is not _NUMBER:
        into = args[1]
    if func is _TO_COPY and str(call.kwargs.get("device", "")).startswith("meta"):
        return call.traits.kernel(*call.held_args, **call.held_kwargs)  # nothing is copied
    source = _index_of(from_)
    destination = _index_of(into) if into is not None else call.target if func is _TO_COPY else None
    if call.index is not None or call.target is not None:
        board.launch(call.index if call.index is not None else call.target or 0)
    run: Callable[[], Any] = partial(call.traits.kernel, *call.held_args, **call.held_kwargs)
    if board.strict and all(board.arena(index).strict for index in (source, destination) if index is not None):
        run = partial(_ordered, call, (from_, source), (into, destination), run)
    if source == destination:
        return run()
    if board.is_timed(source) or board.is_timed(destination):
        return _timed_copy(call, source, destination, run)
    output: list[Any] = []
    to_device = destination is not None
    link = board.links[destination if destination is not None else source or 0]
    link.transfer(lambda: output.append(run()), from_.nbytes, to_device=to_device)
    return output[0]


def _timed_copy(call: _Operation, source: int | None, destination: int | None, run: Callable[[], Any]) -> Any:
    """Run a copy between the host and accelerators of a set speed, or between these: it is done as soon as it can be.

    As on CUDA, copies between two devices are ordered after all work of both, and work of both after it. The host waits
    for a copy to it, unless that need not block, and for the stream of one from its own memory, unless that is pinned.
    """
    if source is None and destination is not None:
        if not (_is_non_blocking(call) and pinned_memory.holds(call.args[1 if call.traits.func is _COPY else 0])):
            sleep_until(streams.current_stream(destination).ready)
        return run()
    output = run()
    if source is not None and destination is not None:
        one, other = streams.current_stream(source), streams.current_stream(destination)
        one.ready = other.ready = max(one.ready, other.ready)
    elif source is not None and not _is_non_blocking(call):
        sleep_until(streams.current_stream(source).ready)
    return output


def _is_non_blocking(call: _Operation) -> bool:
    args = call.args
    return bool(call.kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _ordered(
    call: _Operation,
    from_: tuple[torch.Tensor, int | None],
    into: tuple[torch.Tensor | None, int | None],
    run: Callable[[], Any],
) -> Any:
    """Run a copy between tensors, each with the index of its device, on the streams of strict accelerators."""
    (source, one), (target, other) = from_, into
    non_blocking = _is_non_blocking(call)
    if one is None and other is not None:
        return strict.copy_to_device(target, source, non_blocking, other, run)
    if one is not None and other is None:
        return strict.copy_to_host(target, source, non_blocking, one, run)
    if one is not None and other is not None and one != other:
        if late.is_late(one) and not call.is_complex:
            return strict.copy_between(target, source, one, other, partial(call.queue, index=one))

        def after_both(_launched: Access) -> Any:
            for index in (one, other):
                streams.current_stream(index).catch_up()
            return run()

        return strict.copy_between(target, source, one, other, after_both)
    with detector.lock:
        launched = strict.launch(call.traits, call.args, call.kwargs, call.held_args, call.wrappers, one)
        if late.is_late(one) and one is not None:
            if not call.is_complex:
                return call.queue(launched)
            streams.current_stream(one).catch_up()
    return run()


def _refuse_sparse_gradients(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    where = traits.sparse
    assert where is not None
    asked = kwargs.get(where) if isinstance(where, str) else args[where : where + 1] == (True,)
    if asked and args[0].requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{TYPE} accelerators have no sparse gradients ({traits.func}): use sparse=False")


def _undefined_output(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return tensors like those that an operation would have returned, for a backward pass that is going to raise."""

    def meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    args, kwargs = tree_map(meta, (args, {**kwargs, **({"device": "meta"} if "device" in kwargs else {})}))
    return tree_map(
        lambda value: torch.zeros_like(value, device="cpu") if isinstance(value, torch.Tensor) else value,
        func(*args, **kwargs),
    )


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that user code has set on `tensor`, without those of the wrapper itself."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _OWN}


def _has_inference_tensor(values: Any) -> bool:
    """Whether any of these arguments, lists of them included, was made in inference mode."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_inference():
                return True
        elif isinstance(value, (list, tuple)) and _has_inference_tensor(value):
            return True
    return False


def _are_mixed(lists: Iterable[Any]) -> bool:
    """Whether the lists among these arguments hold tensors of several devices."""
    return len({each.device for value in lists if isinstance(value, (list, tuple)) for each in tensors_in(value)}) > 1


def _index_of(value: Any) -> int | None:
    return value._index if isinstance(value, VirtualTensor) else None
