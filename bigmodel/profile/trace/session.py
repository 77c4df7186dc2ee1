"""A fake model, and a session of its calls, recorded as phases."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...devices import HOST
from ...devices.scripts import OverriddenScripts
from .equal_modules import LayerSample
from .fake_kernels import new_fake
from .initial_buffers import initial_buffers
from .inputs import InputSizes, input_sizes, positional_names
from .recorder import Recorder
from .values import LARGEST, Values, real_tensors
from .work import tensors_in
from .workload import Workload

logger = logging.getLogger(__name__)

_CACHE = type(lru_cache(maxsize=1)(id))


def fake_clone(
    model: nn.Module,
    mode: FakeTensorMode,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    samples: Sequence[LayerSample] = (),
) -> nn.Module:
    """Return a copy of `model` in evaluation mode with fake tensors on `device` and only the sampled blocks.

    Parameters require gradients where the model's do: some forwards enable gradients and save tensors by that.

    Args:
        model: any module, on any device, also meta; not changed. Only the values of integer buffers are read, or
            computed (`initial_buffers`).
        mode: the mode the fake tensors belong to.
        device: device that the fake tensors report.
        dtypes: dtype by `id` of the tensor, for those that will be cast when loaded.
        samples: the blocks to keep of long lists of blocks.
    """
    memo: dict[int, object] = {}
    values = initial_buffers(model) if any(buffer.is_meta for buffer in model.buffers()) else {}
    left_out = {id(block) for sample in samples for block in sample.blocks_of(model)[sample.count :]}
    memo.update((block, nn.Identity()) for block in left_out)
    for module in _modules_without(model, left_out):
        for registry in (module._parameters, module._buffers):
            for tensor in registry.values():
                if tensor is not None and id(tensor) not in memo:
                    fake = memo[id(tensor)] = _fake(tensor, mode, device, dtypes.get(id(tensor), tensor.dtype))
                    if id(tensor) in values:
                        Values().give(fake, values[id(tensor)])
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:  # a weight that a hook has made: not copied
                memo[id(value)] = _fake(value, mode, device, dtypes.get(id(value), value.dtype))
    clone = copy.deepcopy(model, memo)
    for sample in samples:
        parent, _, leaf = sample.path.rpartition(".")
        setattr(clone.get_submodule(parent), leaf, nn.ModuleList(sample.blocks_of(clone)[: sample.count]))
    return clone.eval()


@contextmanager
def without_cached_results(model: nn.Module) -> Iterator[None]:
    """Clear the caches of functions in the files of `model`'s classes, before and after the block.

    Some models compute positions in a function with a `functools.lru_cache`, by shapes and device. A dry run would
    leave a fake tensor there for the next real forward; and a real tensor, computed before, would be missing from the
    trace.
    """
    caches = list(caches_of(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def caches_of(model: nn.Module) -> Iterator[Any]:
    """Yield the caching functions in the files of the classes of `model`'s modules, also those that others wrap."""
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    seen: set[int] = set()
    for name in files:
        if name.partition(".")[0] in ("torch", "builtins"):
            continue
        members = list(vars(sys.modules.get(name)).values()) if name in sys.modules else []
        classes = [member for member in members if isinstance(member, type) and member.__module__ == name]
        for member in (*members, *(each for kind in classes for each in vars(kind).values())):
            yield from _caches_in(member, seen)


def _caches_in(function: Any, seen: set[int]) -> Iterator[Any]:
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, _CACHE):
        yield function
    elif isinstance(function, (staticmethod, classmethod)):
        yield from _caches_in(function.__func__, seen)
    elif isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
            if isinstance(content, (_CACHE, FunctionType)):
                yield from _caches_in(content, seen)


def let_parts_convert(clone: nn.Module) -> None:
    """Let modules of fake tensors be moved and cast, as models do with parts of themselves in their forward: PyTorch's
    own method swaps fake tensors, which fails for those that are referenced weakly."""
    for module in clone.modules():
        module.__dict__["_apply"] = partial(_convert, module)


def _convert(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    for part in module.modules() if recurse else (module,):
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            converted = convert(parameter)
            if converted is not parameter:
                part._parameters[name] = nn.Parameter(converted, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else convert(buffer)
    return module


def _modules_without(model: nn.Module, left_out: set[int]) -> list[nn.Module]:
    found, stack, seen = [], [model], set(left_out)
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            stack.extend(module.children())
    return found


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    fake = new_fake(tensor.shape, dtype, device, mode)
    if isinstance(tensor, nn.Parameter):
        fake.requires_grad = tensor.requires_grad
        vars(fake)["_is_param"] = True  # as its constructor does for tensors of other types, with a detached copy
        return fake
    if not tensor.is_floating_point() and tensor.device.type == HOST and tensor.numel() <= LARGEST:
        Values().give(fake, tensor.detach().clone())  # buffers such as the stride of a convolution
    return fake


class Session:
    """Calls a fake model and records its forwards as phases.

    Attributes:
        recorder: the recorder of its events.
        device: device that the fake tensors report.
        sequences: texts that the model computes at once: the workload's, or as many for each beam.
        marks: (name, (first event, end), tokens of each sequence) of every phase so far.
        grows: whether modules keep more with each forward, as the last one shows.
        inputs: sizes of the arguments of plain forwards.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, workload: Workload, device: torch.device) -> None:
        self.model = model
        self.workload = workload
        self.marks: list[tuple[str, tuple[int, int], int]] = []
        self.recorder = recorder
        self.device = device
        self.sequences = workload.batch_size
        self.grows = False
        self.inputs: list[InputSizes] = []
        signature = inspect.signature(model.forward)
        self._accepted = set(signature.parameters)
        self._positional = positional_names(signature)

    def accepts(self, name: str) -> bool:
        """Return whether the model's forward takes an argument of this name."""
        return name in self._accepted

    def phase(self, name: str, tokens: int, run: Callable[[], Any]) -> Any:
        """Record `run` as one phase and return its result."""
        first = len(self.recorder.events)
        result = run()
        self.marks.append((name, (first, len(self.recorder.events)), tokens))
        return result

    def attempt(self, name: str, tokens: int, run: Callable[[], Any]) -> None:
        """Record `run` as one phase; as none if it raises."""
        try:
            self.phase(name, tokens, run)
        except Exception as error:  # any error of the model's own forward on inputs that it may not take
            self.recorder.abandon()
            logger.debug("%s of %s: %s", name, type(self.model).__name__, error)

    def call(self, **inputs: Any) -> Any:
        """Call the model with those of `inputs` that its forward takes."""
        inputs = {name: value for name, value in inputs.items() if name in self._accepted}
        return self.recorder.call(lambda: self.model(**inputs), inputs)

    def generate_with(
        self, kept: Sequence[torch.Tensor] = (), unread: Sequence[torch.Tensor] = (), **inputs: Any
    ) -> Any:
        """Call the model as `generate` does, with those of `inputs` that its forward takes.

        Args:
            kept: inputs, or tensors within them, that `generate` keeps after the call.
            unread: further tensors that it keeps; not passed to the model.
            inputs: by name.
        """
        inputs = {name: value for name, value in inputs.items() if name in self._accepted}
        tensors = tensors_in(inputs)
        fresh = [tensor for tensor in tensors if not any(tensor is other for other in kept)]
        passed = [other for other in kept if any(other is tensor for tensor in tensors)]
        return self.recorder.call(lambda: self.model(**inputs), inputs, fresh, [*passed, *unread])

    def call_plain(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with just these arguments, whose sizes are noted once it has returned."""
        given = (args, kwargs) if args else kwargs
        result = self.recorder.call(lambda: self.model(*args, **kwargs), given)
        sizes = input_sizes(self._positional, args, kwargs)
        if sizes not in self.inputs:
            self.inputs.append(sizes)
        return result

    def forward(self, tokens: int, **inputs: torch.Tensor) -> None:
        """Record one forward, with `tokens` tokens of each sequence, whose output is freed at once."""

        def run() -> None:
            self.call(**inputs)

        self.phase("forward", tokens, run)

    def tokens(self, length: int, value: torch.Tensor | None = None) -> torch.Tensor:
        """Return fake token ids, or other integers per token: int64, (sequences, length); zeros, or `value`."""
        fake = torch.zeros(self.sequences, length, dtype=torch.long, device=self.device)
        if value is not None:
            self.recorder.values.give(fake, value)
        return fake

    def ids(self, count: int) -> torch.Tensor:
        """Return `count` fake token ids without a batch dimension: int64, (count,)."""
        return torch.zeros(count, dtype=torch.long, device=self.device)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of samples: that of the model's first floating point parameter, but for those of 8 bits, which are
        cast before anything is computed with them. None: there is none, and samples keep their own."""
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next((dtype for dtype in floats if dtype.itemsize > 1), None)

    def fake(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        """Return `value` with every tensor in it replaced by a fake one of its shape and dtype.

        Args:
            value: nested arguments. Integers and booleans keep their values; floating point samples have none.
            dtype: dtype of floating point samples; None: their own.
        """

        def one(item: Any) -> Any:
            if isinstance(item, PackedSequence):  # recurrent layers read its sizes past any dispatch
                data, order, inverse = map(one, (item.data, item.sorted_indices, item.unsorted_indices))
                return PackedSequence(data, item.batch_sizes, order, inverse)
            if not isinstance(item, torch.Tensor):
                return item
            wanted = dtype if dtype is not None and item.is_floating_point() else item.dtype
            fake = torch.empty(item.shape, dtype=wanted, device=self.device)
            self.recorder.values.forget(fake)
            if not item.is_floating_point() and item.device.type != "meta":
                with real_tensors():
                    self.recorder.values.give(fake, item.detach().to("cpu", copy=True))
            return fake

        return tree_map(one, value, is_leaf=lambda item: isinstance(item, PackedSequence))


_FOR_REAL_ONLY = {torch.Tensor.__format__, torch._VF._pad_packed_sequence, torch.tensor, torch.as_tensor}
"""Functions that `ConstantsThroughHost` replaces, sometimes."""

_GETTERS = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout", "requires_grad", "is_cuda")),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_floating_point),
}
"""Functions that return no tensors, and are no operations."""


class ConstantsThroughHost(TorchFunctionMode):
    """Supports functions on fake tensors that PyTorch implements for real ones only.

    `torch.tensor(data, device=...)` would return a real tensor on another device than the CPU, and would read the
    numbers of fake tensors in a list of them. A tensor of one number can be formatted, as in names of experts. Packed
    sequences are padded.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _FOR_REAL_ONLY:
            return func(*args, **kwargs)
        if func is torch.Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])
        if func is torch._VF._pad_packed_sequence:
            return _padded(*args, **kwargs)
        if func is torch.tensor and args and isinstance(args[0], list):
            args = (tree_map(lambda leaf: leaf.item() if _is_number(leaf) else leaf, args[0]), *args[1:])
        device = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        if func is torch.as_tensor and isinstance(args[0], torch.Tensor):
            return args[0].to(device, kwargs.get("dtype"))
        return func(*args, **{**kwargs, "device": "cpu"}).to(device)


def _padded(
    packed: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded sequences and their lengths, which are known."""
    with real_tensors():
        shape, lengths = torch._VF._pad_packed_sequence(torch.empty(packed.shape[0]), sizes, False, 0.0, steps)
    padded = packed.new_full((*shape.shape, *packed.shape[1:]), value)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


class BroughtToWeights(ConstantsThroughHost):
    """Also tells a recorder of tensors brought to the device of a weight, as in `x.to(self.conv.weight.device)`.

    All fake tensors are on one device, so nothing would be recorded. Where the two lie on different devices, the model
    that runs for real makes a copy, beside the tensor that it was made of. Each weight gets an object of its own that
    stands for its device, equal to those of all other tensors.

    Args:
        recorder: follows the units of `model`.
        model: the fake model.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        super().__init__()
        self._recorder = recorder
        self._units: dict[int, tuple[torch.device, int]] = {}  # by id: the device of a weight, and its unit
        self._weights: set[int] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            unit = recorder.unit_of(tensor)
            if unit is not None and isinstance(tensor, FakeTensor):
                self.device = tensor.device
                tensor.fake_device = torch.device(tensor.device.type, tensor.device.index)
                self._units[id(tensor.fake_device)] = tensor.fake_device, unit
                self._weights.add(id(tensor))

    def __enter__(self) -> BroughtToWeights:
        self._scripts = OverriddenScripts(lambda tensor: isinstance(tensor, FakeTensor))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._scripts.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _GETTERS:
            return func(*args, **kwargs)
        if not self._recorder.begin_function(args, kwargs):
            output = super().__torch_function__(func, types, args, kwargs)
        else:
            try:
                output = super().__torch_function__(func, types, args, kwargs)
            finally:
                self._recorder.end_function()
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            computed = isinstance(tensor, FakeTensor) and id(tensor) not in self._weights
            if computed and id(tensor.fake_device) in self._units:
                tensor.fake_device = self.device
        if func is torch.Tensor.to:
            given = (*args[1:], *kwargs.values())
            units = [self._units[id(each)][1] for each in given if id(each) in self._units]
            if units:
                return self._recorder.bring(output, units[0])
        return output
