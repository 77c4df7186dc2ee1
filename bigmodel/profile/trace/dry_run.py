"""Dry run: a model's real forward runs on fake tensors at given shapes, and its allocations are recorded.

This is how activations and KV cache are known before any weight is read:

1. `fake_clone` copies the model with fake tensors; of a deep model only a few layers (`LayerSample`).
2. `Session` calls the clone in one of its `uses`: generation, or a plain forward.
3. `Recorder` turns each operation and each freed storage into events of a `Trace`.
4. `extrapolate` repeats the events of the recorded layers in the place of those that were left out.

`bigmodel.profile.trace.ledger` then computes peaks from the traces, for any device map.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...arguments import check_names, shown
from ...devices import HOST
from ...errors import PlanError
from ...quantized.packable import plan_products
from ..model.units import UnitProfile
from .branches import other_ways
from .equal_modules import LayerSample, find_layer_samples, model_signature
from .extrapolate import CannotExtrapolate, extrapolate, refuse_gathered
from .fake_kernels import fake_mode
from .generation import ALTERNATIVE, FROM_HOST, FURTHER
from .inputs import InputSizes
from .recorder import Recorder
from .recordings import SHARED, Recording
from .replaying import ReplayingRecorder
from .session import (
    BroughtToWeights,
    Session,
    fake_clone,
    let_parts_convert,
    without_cached_results,
)
from .trace import Trace, cut
from .uses import Use, use_sample, uses_of
from .values import Values, read_as_real, reading
from .workload import Workload

logger = logging.getLogger(__name__)

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a model's forward."""

SampleInputs = Mapping[str, Any] | Sequence[Any] | torch.Tensor
"""Arguments of a model's forward as users give them: see `read_sample`."""


@dataclass(frozen=True)
class Phase:
    """One recorded forward.

    Attributes:
        name: "prefill", "decode" or "forward".
        trace: its events.
        tokens: tokens of each sequence that it processes.
        from_host: the trace of a model that runs on the host: transformers chooses kernels by its device. None: the
            same as `trace`.
        also: further forwards of this kind that may take more memory: of padded sequences, or the step before a sliding
            window is full.
        packed: the same forward on the host, which computes weights packed where it can. None: it restores them.
        without: as `Use.without`.
        combined: as `Recorder.combined`, over all phases of the use; None: not known.
        lent: as `Recorder.lent`, over all phases of the use.
        grows: bytes that modules keep more after each forward.
        repeats: forwards like it that follow each other: those of a prompt that is run in chunks.
        inputs: sizes of the arguments of plain forwards, of all phases of the use.
    """

    name: str
    trace: Trace
    tokens: int
    from_host: Trace | None = None
    also: tuple[Trace, ...] = ()
    without: str = ""
    combined: frozenset[int] | None = None
    lent: frozenset[int] = frozenset()
    packed: Phase | None = None
    grows: int = 0
    repeats: int = 1
    inputs: tuple[InputSizes, ...] = ()

    def with_traces(self, changed: Callable[[Trace], Trace]) -> Phase:
        """Return the same phase with each of its traces changed."""
        from_host = None if self.from_host is None else changed(self.from_host)
        packed = None if self.packed is None else self.packed.with_traces(changed)
        also = tuple(map(changed, self.also))
        return replace(self, trace=changed(self.trace), from_host=from_host, also=also, packed=packed)

    def without_workspace(self) -> Phase:
        """Return the same phase without the workspace of kernels."""
        return self.with_traces(lambda trace: trace.without_workspace)

    def trace_on(self, main: object) -> Trace:
        """Return the trace for a model whose main device is `main`."""
        return self.from_host if main == HOST and self.from_host is not None else self.trace


def with_packed(phases: Sequence[Phase], on_host: Sequence[Phase]) -> list[Phase]:
    """Return phases with those of the same forwards on the host, whose weights are packed, if these were recorded."""
    if [phase.name for phase in phases] != [phase.name for phase in on_host]:
        return list(phases)
    return [replace(phase, packed=packed) for phase, packed in zip(phases, on_host, strict=True)]


def read_sample(sample_inputs: object) -> Example | None:
    """Return the positional and keyword arguments of forward in sample inputs.

    Args:
        sample_inputs: keyword arguments by name; or one tensor, or a tuple of positional arguments; or a pair of
            a tuple and a mapping. Tensors may be on meta. None: none.

    Raises:
        PlanError: it is none of these; the message names its type.
    """
    if sample_inputs is None:
        return None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(sample_inputs, torch.Tensor):
        args = (sample_inputs,)
    elif isinstance(sample_inputs, Mapping):
        kwargs = sample_inputs
    elif isinstance(sample_inputs, (tuple, list)):
        paired = len(sample_inputs) == 2 and isinstance(sample_inputs[1], Mapping)
        if paired and isinstance(sample_inputs[0], (tuple, list)):
            args, kwargs = sample_inputs
        else:
            args = sample_inputs
    else:
        raise PlanError(
            f"sample_inputs is {shown(sample_inputs)}; give forward's arguments: a mapping of names, or a tuple"
        )
    check_names("sample_inputs' keyword arguments", kwargs)
    return args, kwargs


def dry_run(
    model: nn.Module,
    units: Sequence[UnitProfile],
    workload: Workload,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype] | None = None,
    example: Example | None = None,
    every_layer: bool = False,
    packed: bool = False,
) -> list[Phase]:
    """Record what a model allocates at the shapes of `workload`, or on `example`. No memory is taken.

    Args:
        model: any module, also on meta; not changed.
        units: its units; events name them by their position.
        workload: shapes for a transformers model.
        device: device that the fake tensors report; kernels differ between kinds of devices.
        dtypes: dtype by `id` of a tensor, for those that will be cast when loaded.
        example: arguments of forward, for a model whose config does not describe its inputs. Values of floating point
            samples are not read.
        every_layer: run every layer of a deep model, and every call of its modules, instead of extrapolating from a few
            and replaying repeated calls; slower, same result.
        packed: weights are computed packed where the host can.

    Returns:
        The phases in order: prefill and decode for a model that generates, else one forward. Empty if the inputs
        are unknown, or if the forward depends on values.
    """
    # A backward's own thread would free its last gradients some time after the forward has gone on.
    with torch.autograd.set_multithreading_enabled(False), _quiet(), without_cached_results(model), read_as_real():
        return _dry_run(model, units, workload, device, dtypes or {}, example, every_layer, packed)


def _dry_run(
    model: nn.Module,
    units: Sequence[UnitProfile],
    workload: Workload,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    example: Example | None,
    every_layer: bool,
    packed: bool,
) -> list[Phase]:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        logger.warning(
            "activations of %s are not known: TorchScript does not run on fake tensors", type(model).__name__
        )
        return []
    samples = [] if every_layer else find_layer_samples(model, units)
    given = None if example is None else Use(partial(use_sample, args=example[0], kwargs=example[1]))
    clones = [_Clone(model, units, device, dtypes, chosen, packed, every_layer) for chosen in _choices(samples)]
    attempts = _Attempts(clones, workload)
    found: list[Phase] = []
    known: dict[str, bool] = {}  # by kind of media: whether a use with it has been recorded
    way = ""
    for use in uses_of(model, workload) if given is None else [given]:
        if found and (use.way != way or not use.media or known.get(use.media)):
            continue  # what is recorded already takes as much, or another kind of media is left
        phases = attempts.record(use)
        known[use.media] = bool(phases)
        if phases and not use.media:
            return phases
        if phases:
            found, way = joined(found, phases), use.way
    if not found and attempts.errors:
        logger.warning(
            "activations of %s are not known, because its forward cannot run on fake tensors: %s",
            type(model).__name__,
            attempts.errors[0],
        )
    left_out = sorted(media for media, recorded in known.items() if media and not recorded)
    return [replace(phase, without=" or ".join(filter(None, [phase.without, *left_out]))) for phase in found]


def _choices(samples: Sequence[LayerSample]) -> list[list[LayerSample]]:
    """Return the samples of layers to try, one after the other: all, that of the longest list, none.

    An encoder whose outputs between layers are read by their positions, as those of images often are, must run whole.
    """
    if not samples:
        return [[]]
    longest = max(samples, key=lambda sample: len(sample.units) - sample.count)
    return [list(samples), *([[longest]] if len(samples) > 1 else []), []]


def joined(phases: Sequence[Phase], others: Sequence[Phase]) -> list[Phase]:
    """Return phases with those of another use as further forwards: the same model is used in both ways."""
    if not phases:
        return list(others)
    found = {phase.name: phase for phase in phases}
    for other in others:
        phase = found[other.name if other.name in found else phases[0].name]
        found[phase.name] = replace(
            phase,
            also=(*phase.also, other.trace, *other.also),
            combined=None if phase.combined is None else phase.combined | (other.combined or frozenset()),
            lent=phase.lent | other.lent,
            grows=max(phase.grows, other.grows),
            inputs=(*phase.inputs, *other.inputs),
        )
    return list(found.values())


class _Attempts:
    """Records uses of a model on the first of its clones that can run them.

    Attributes:
        errors: what was raised so far.
    """

    def __init__(self, clones: Sequence[_Clone], workload: Workload) -> None:
        self.errors: list[Exception] = []
        self._clones, self._workload = clones, workload
        self._not_sampling: set[str] = set()  # errors of a sample of layers that the whole model raised too

    def record(self, use: Use) -> list[Phase]:
        """Return the phases of a use; none if it raises an error, which is kept."""
        first = len(self.errors)
        tried = None
        for clone in self._clones:  # where a sample of the layers cannot run or be extrapolated, more layers run
            if tried is not None:
                raised = self.errors[-1]
                if str(raised) in self._not_sampling or tried.fails_as_whole(raised):
                    break
            tried = clone
            found = self._record_ways(clone, use)
            if found:
                return found
        messages = {str(error) for error in self.errors[first:]}
        if len(messages) == 1:
            self._not_sampling |= messages
        return []

    def _record_ways(self, clone: _Clone, use: Use) -> list[Phase]:
        """Return the phases of a use on a clone, with those of other ways through its forward as further ones; none if
        each raises an error."""
        found: list[list[Phase]] = []
        first = Values()
        self._record_way(clone, use, first, found)
        for answers in other_ways(first.answers) if first.answers is not None else ():
            self._record_way(clone, use, Values(answers), found)
        return reduce(joined, found, [])

    def _record_way(self, clone: _Clone, use: Use, values: Values, found: list[list[Phase]]) -> None:
        """Add the phases of one way, unless they are the same as those of another."""
        try:
            phases = clone.record(use, self._workload, values)
        except Exception as error:  # any error of the model's own forward on unsuitable inputs or values
            logger.debug("dry run of %s: %s", clone.name, error)
            if not found:
                self.errors.append(error)
        else:
            if phases not in found:
                found.append(phases)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's log of unsupported fake kernels, which has stack traces; `_dry_run` logs one line instead."""
    noisy = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, noisy.disabled = noisy.disabled, True
    try:
        yield
    finally:
        noisy.disabled = disabled


class _Clone:
    """A fake copy of a model, of all layers or of a sample of them, that uses are recorded on."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitProfile],
        device: torch.device,
        dtypes: Mapping[int, torch.dtype],
        samples: Sequence[LayerSample],
        packed: bool,
        every_call: bool,
    ) -> None:
        self._model, self._units, self._device, self._dtypes, self._samples = model, units, device, dtypes, samples
        self._packed = packed
        self._kind = Recorder if every_call else ReplayingRecorder
        self._mode = fake_mode()
        self._missed = True
        self._recorded = 0
        left_out = {unit for sample in samples for unit in sample.units[sample.count :]}
        self._kept = tuple(index for index in range(len(units)) if index not in left_out)

    @property
    def name(self) -> str:
        """Class name of the model."""
        return type(self._model).__name__

    def fails_as_whole(self, error: Exception) -> bool:
        """Whether the whole model would raise `error`, too: no layer was missing when it was raised, nor was one
        accessed, nor is it about the sample."""
        return not self._missed and not isinstance(error, (LookupError, AttributeError, CannotExtrapolate))

    @cached_property
    def _clone(self) -> nn.Module:
        clone = fake_clone(self._model, self._mode, self._device, self._dtypes, self._samples)
        let_parts_convert(clone)
        if self._packed:
            plan_products(clone)
        return clone

    def record(self, use: Use, workload: Workload, values: Values) -> list[Phase]:
        """Return the phases of a use."""
        recording = self._recording(use, workload, values)
        for sample in self._samples:
            refuse_gathered(sample, recording.gathered)
        combined, lent = recording.combined, recording.lent
        for sample in self._samples:
            combined, lent = sample.extended(combined), sample.extended(lent)
        phases: list[Phase] = []
        further: list[Trace] = []
        for (name, tokens), trace in zip(recording.marks, recording.traces, strict=True):
            for sample in self._samples:
                trace = extrapolate(trace, sample)
            if name == FROM_HOST:
                phases[-1] = replace(phases[-1], from_host=trace)
            elif name == ALTERNATIVE:
                phases[-1] = replace(phases[-1], also=(*phases[-1].also, trace))
            elif name == FURTHER:
                further.append(trace)
            else:
                repeats = workload.forwards_of_prompt(tokens) if name == "prefill" else 1
                known = tuple(further), use.without, combined, lent
                phases.append(Phase(name, trace, tokens, None, *known, repeats=repeats, inputs=recording.inputs))
                further.clear()
        if recording.grows and phases[-1].name == "forward":
            phases[-1] = replace(phases[-1], grows=phases[-1].trace.kept)
        return phases

    def _recording(self, use: Use, workload: Workload, values: Values) -> Recording:
        """Return what the clone records of a use, or what an equal clone has recorded where recordings are shared."""
        self._recorded += 1
        shared = SHARED.get()
        if shared is None or values.answers is not None:
            return self._run(use, workload, values)
        key = self._key(workload)
        if key in shared:
            return shared[key].of_units(self._kept)
        found = self._run(use, workload, values)
        if values.answers is None:  # the only way through its forward
            shared[key] = found
        return found

    def _key(self, workload: Workload) -> Hashable:
        """Return a value that is equal for clones that record the same of the use that comes now: uses follow from the
        model and the workload."""
        blocks = {sample.path: sample.count for sample in self._samples}
        dtypes = frozenset(self._dtypes.values())
        return model_signature(self._model, blocks), self._recorded, workload, self._device, dtypes, self._packed

    def _run(self, use: Use, workload: Workload, values: Values) -> Recording:
        clone = self._clone
        recorder = self._kind(iter([*clone.parameters(), *clone.buffers()]), values, self._device)
        if isinstance(recorder, ReplayingRecorder):
            recorder.replay_calls(clone)
        self._follow_units(recorder)
        missing = self._watch_ends()
        session = Session(clone, recorder, workload, self._device)
        try:
            brought = BroughtToWeights(recorder, clone)
            with self._mode, recorder, reading(values), brought, torch.no_grad():
                use.record(session)
        finally:
            recorder.unfollow()
            for handle in missing:
                handle.remove()
        return Recording(
            units=self._kept,
            marks=tuple((name, tokens) for name, _, tokens in session.marks),
            traces=tuple(cut(recorder.events, [mark for _, mark, _ in session.marks])),
            combined=frozenset(recorder.combined),
            lent=frozenset(recorder.lent),
            gathered=tuple(map(frozenset, recorder.gathered)),
            grows=session.grows,
            inputs=tuple(session.inputs),
        )

    def _watch_ends(self) -> list[RemovableHandle]:
        """Record when the last layer of a sample has run: from then on the layers that are left out are missing."""
        self._missed = False

        def miss(*_: Any) -> None:
            self._missed = True

        return [sample.blocks_of(self._clone)[-1].register_forward_hook(miss) for sample in self._samples]

    def _follow_units(self, recorder: Recorder) -> None:
        followed: set[int] = set()
        for index in self._kept:
            unit = self._units[index]
            if unit.is_tensor:
                continue
            module = self._clone.get_submodule(unit.name)
            if id(module) not in followed:
                followed.add(id(module))
                for position, experts in enumerate(unit.experts):
                    recorder.follow_experts(self._clone.get_submodule(experts.name), position, experts)
                recorder.follow(module, index, bool(unit.tensors), unit.is_lookup)
