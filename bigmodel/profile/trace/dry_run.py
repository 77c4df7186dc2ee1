"""Runs a model's real forward on fake tensors at the shapes to be used, and records what it allocates.

A copy of a model whose tensors are fake: it runs, allocates nothing, and the model itself is left alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
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
from .extrapolate import Shortening, find_shortenings, lengthen
from .recorder import Recorder
from .session import ConstantsThroughHost, Session
from .trace import Trace, cut
from .usage import FROM_HOST, use_as_configured, use_example
from .workload import Workload

logger = logging.getLogger(__name__)

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a model's forward."""


@dataclass(frozen=True)
class Phase:
    """One recorded forward.

    Attributes:
        name: "prefill", "decode" or "forward".
        trace: what happens.
        tokens: how many tokens of each sequence it processes.
        from_host: what happens instead where the model's first weights lie on the host, as `transformers` goes by
            their device; None for the same.
    """

    name: str
    trace: Trace
    tokens: int
    from_host: Trace | None = None

    def without_workspace(self) -> Phase:
        """Return the same with kernels that take nothing for themselves."""
        from_host = None if self.from_host is None else self.from_host.without_workspace
        return replace(self, trace=self.trace.without_workspace, from_host=from_host)

    def trace_from(self, first: object) -> Trace:
        """Return what happens where the model's first weights lie on the device `first`."""
        return self.from_host if first == HOST and self.from_host is not None else self.trace


def check_example(example: object) -> None:
    """Refuse what are no positional and keyword arguments.

    Raises:
        PlanError: says what it is.
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
        device: what kind of device the tensors are to pretend to be on; kernels differ between kinds.
        dtypes: dtype by `id` of a tensor, for those that will be cast when loaded.
        example: arguments of forward, for a model whose inputs cannot be told from its config. Their values are
            not read.
        every_layer: run every layer of a deep model, and not a few that stand for all; slower, same result.

    Returns:
        The phases in order: prefill and decode for a model that generates, else one forward. Empty if the inputs
        are not known, or if what the model does depends on values.
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
    shortenings = [] if every_layer or example is not None else find_shortenings(model, units)
    if shortenings:
        try:
            return _record(model, units, workload, device, dtypes, example, shortenings)
        except Exception as error:  # the cut model cannot run or repeat: the whole one decides
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
    """PyTorch logs a fake kernel's refusal with its whole stack; what it means is said in one line here."""
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
    shortenings: Sequence[Shortening],
) -> list[Phase]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    clone = fake_clone(model, mode, device, dtypes, shortenings)
    recorder = Recorder(iter([*clone.parameters(), *clone.buffers()]))
    _follow_units(clone, units, shortenings, recorder)
    session = Session(clone, recorder, workload, device)
    with mode, recorder, ConstantsThroughHost(), torch.no_grad():
        if example is not None:
            use_example(session, *example)
        else:
            use_as_configured(session)
    traces = cut(recorder.events, [mark for _, mark, _ in session.marks])
    phases: list[Phase] = []
    for (name, _, tokens), trace in zip(session.marks, traces, strict=True):
        for shortening in shortenings:
            trace = lengthen(trace, shortening)
        if name == FROM_HOST:
            phases[-1] = replace(phases[-1], from_host=trace)
        else:
            phases.append(Phase(name, trace, tokens))
    return phases


def _follow_units(
    clone: nn.Module, units: Sequence[UnitProfile], shortenings: Sequence[Shortening], recorder: Recorder
) -> None:
    left_out = {unit for shortening in shortenings for unit in shortening.units[shortening.kept :]}
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
    shortenings: Sequence[Shortening] = (),
) -> nn.Module:
    """Return a copy of `model` in evaluation mode with fake tensors on `device`, its long lists of blocks cut.

    Args:
        model: any module, on any device, also meta; not changed, no value of it is read.
        mode: the mode the fake tensors belong to.
        device: where the fake tensors pretend to be.
        dtypes: dtype by `id` of the tensor, for those that will be cast when loaded.
        shortenings: lists of blocks to cut, and how.
    """
    memo: dict[int, object] = {}
    left_out = {id(block) for cut in shortenings for block in _blocks(model, cut)[cut.kept :]}
    memo.update((block, nn.Identity()) for block in left_out)
    for module in _modules_without(model, left_out):
        for registry in (module._parameters, module._buffers):
            for tensor in registry.values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _fake(tensor, mode, device, dtypes.get(id(tensor), tensor.dtype))
    clone = copy.deepcopy(model, memo)
    for shortening in shortenings:
        parent, _, leaf = shortening.path.rpartition(".")
        setattr(clone.get_submodule(parent), leaf, nn.ModuleList(_blocks(clone, shortening)[: shortening.kept]))
    return clone.eval().requires_grad_(False)


def _blocks(model: nn.Module, shortening: Shortening) -> list[nn.Module]:
    return list(model.get_submodule(shortening.path).children())


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
