"""Dry run: a model's real forward runs on fake tensors at given shapes, and its allocations are recorded.

This is how activations and KV cache are known before any weight is read:

1. `fake_clone` copies the model with fake tensors; of a deep model only a few layers (`extrapolate`).
2. `Session` and `usage` call the clone as `generate`, a translation or a plain forward would.
3. `Recorder` turns each operation and each freed storage into events of a `Trace`.
4. `extrapolate` repeats the recorded layers for those that were left out.

`bigmodel.profile.trace.ledger` then computes peaks from the traces, for any device map.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...arguments import check_names, shown
from ...devices import HOST
from ...errors import PlanError
from ..model.units import UnitProfile
from .extrapolate import LayerSample, extrapolate, find_layer_samples
from .recorder import Recorder
from .session import ConstantsThroughHost, Session
from .trace import Trace, cut
from .usage import FILLING, FROM_HOST, use_as_configured, use_example
from .workload import Workload

logger = logging.getLogger(__name__)

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a model's forward."""


@dataclass(frozen=True)
class Phase:
    """One recorded forward.

    Attributes:
        name: "prefill", "decode" or "forward".
        trace: its events.
        tokens: tokens of each sequence that it processes.
        from_host: the trace if the model's first weights lie on the host, as `transformers` chooses kernels by their
            device; None: the same as `trace`.
        also: further forwards of this kind that may take more memory, as the step before a sliding window is full.
    """

    name: str
    trace: Trace
    tokens: int
    from_host: Trace | None = None
    also: tuple[Trace, ...] = ()

    def with_traces(self, changed: Callable[[Trace], Trace]) -> Phase:
        """Return the same phase with each of its traces changed."""
        from_host = None if self.from_host is None else changed(self.from_host)
        return replace(self, trace=changed(self.trace), from_host=from_host, also=tuple(map(changed, self.also)))

    def without_workspace(self) -> Phase:
        """Return the same phase without the workspace of kernels."""
        return self.with_traces(lambda trace: trace.without_workspace)

    def trace_from(self, first: object) -> Trace:
        """Return the trace for a model whose first weights lie on the device `first`."""
        return self.from_host if first == HOST and self.from_host is not None else self.trace


def check_example(example: object) -> None:
    """Check that `example` is a pair of positional and keyword arguments.

    Raises:
        PlanError: it is not; names its type.
    """
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise PlanError(f"example is {shown(example)}; give a pair of positional and keyword arguments of forward")
    args, kwargs = example
    if not isinstance(args, (tuple, list)):
        raise PlanError(f"example's positional arguments are {shown(args)}; give a tuple")
    check_names("example's keyword arguments", kwargs)


def dry_run(
    model: nn.Module,
    units: Sequence[UnitProfile],
    workload: Workload,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype] | None = None,
    example: Example | None = None,
    every_layer: bool = False,
) -> list[Phase]:
    """Record what a model allocates at the shapes of `workload`, or on `example`. No memory is taken.

    Args:
        model: any module, also on meta; not changed.
        units: its units; events name them by their position.
        workload: shapes for a transformers model.
        device: device that the fake tensors report; kernels differ between kinds of devices.
        dtypes: dtype by `id` of a tensor, for those that will be cast when loaded.
        example: arguments of forward, for a model whose config does not describe its inputs. Their values are
            not read.
        every_layer: run every layer of a deep model instead of extrapolating from a few; slower, same result.

    Returns:
        The phases in order: prefill and decode for a model that generates, else one forward. Empty if the inputs
        are unknown, or if the forward depends on values.
    """
    with _quiet():
        return _dry_run(model, units, workload, device, dtypes or {}, example, every_layer)


def _dry_run(
    model: nn.Module,
    units: Sequence[UnitProfile],
    workload: Workload,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    example: Example | None,
    every_layer: bool,
) -> list[Phase]:
    samples = [] if every_layer or example is not None else find_layer_samples(model, units)
    if samples:
        try:
            return _record(model, units, workload, device, dtypes, example, samples)
        except Exception as error:  # the sampled model cannot run or be extrapolated: run the whole one
            logger.debug("dry run of every layer, because %s", error)
    try:
        return _record(model, units, workload, device, dtypes, example, [])
    except Exception as error:  # whatever a model's own forward raises when it sees no values
        logger.warning(
            "activations of %s are not known and count as 0, because its forward cannot run without values: %s",
            type(model).__name__,
            error,
        )
    return []


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's log of unsupported fake kernels, which has whole stacks; `_dry_run` logs one line instead."""
    noisy = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, noisy.disabled = noisy.disabled, True
    try:
        yield
    finally:
        noisy.disabled = disabled


def _record(
    model: nn.Module,
    units: Sequence[UnitProfile],
    workload: Workload,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    example: Example | None,
    samples: Sequence[LayerSample],
) -> list[Phase]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    clone = fake_clone(model, mode, device, dtypes, samples)
    recorder = Recorder(iter([*clone.parameters(), *clone.buffers()]), device=device)
    _follow_units(clone, units, samples, recorder)
    session = Session(clone, recorder, workload, device)
    with mode, recorder, ConstantsThroughHost(), torch.no_grad():
        if example is not None:
            use_example(session, *example)
        else:
            use_as_configured(session)
    traces = cut(recorder.events, [mark for _, mark, _ in session.marks])
    phases: list[Phase] = []
    filling: list[Trace] = []
    for (name, _, tokens), trace in zip(session.marks, traces, strict=True):
        for sample in samples:
            trace = extrapolate(trace, sample)
        if name == FROM_HOST:
            phases[-1] = replace(phases[-1], from_host=trace)
        elif name == FILLING:
            filling.append(trace)
        else:
            phases.append(Phase(name, trace, tokens, also=tuple(filling)))
    return phases


def _follow_units(
    clone: nn.Module, units: Sequence[UnitProfile], samples: Sequence[LayerSample], recorder: Recorder
) -> None:
    left_out = {unit for sample in samples for unit in sample.units[sample.count :]}
    followed: set[int] = set()
    for index, unit in enumerate(units):
        if unit.is_tensor or index in left_out:
            continue
        module = clone.get_submodule(unit.name)
        if id(module) not in followed:
            followed.add(id(module))
            recorder.follow(module, index)
            for position, experts in enumerate(unit.experts):
                recorder.follow_experts(clone.get_submodule(experts.name), position, experts.count)


def fake_clone(
    model: nn.Module,
    mode: FakeTensorMode,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    samples: Sequence[LayerSample] = (),
) -> nn.Module:
    """Return a copy of `model` in evaluation mode with fake tensors on `device` and only the sampled blocks.

    Args:
        model: any module, on any device, also meta; not changed, no value of it is read.
        mode: the mode the fake tensors belong to.
        device: device that the fake tensors report.
        dtypes: dtype by `id` of the tensor, for those that will be cast when loaded.
        samples: the blocks to keep of long lists of blocks.
    """
    memo: dict[int, object] = {}
    left_out = {id(block) for sample in samples for block in _blocks(model, sample)[sample.count :]}
    memo.update((block, nn.Identity()) for block in left_out)
    for module in _modules_without(model, left_out):
        for registry in (module._parameters, module._buffers):
            for tensor in registry.values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _fake(tensor, mode, device, dtypes.get(id(tensor), tensor.dtype))
    clone = copy.deepcopy(model, memo)
    for sample in samples:
        parent, _, leaf = sample.path.rpartition(".")
        setattr(clone.get_submodule(parent), leaf, nn.ModuleList(_blocks(clone, sample)[: sample.count]))
    return clone.eval().requires_grad_(False)


def _blocks(model: nn.Module, sample: LayerSample) -> list[nn.Module]:
    return list(model.get_submodule(sample.path).children())


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
    with mode:
        fake = torch.empty(tensor.shape, dtype=dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=False)
    return fake
