"""The profile of a model: bytes of every unit, KV cache, and activations of every phase, measured by a dry run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..arguments import check_choice, check_model, optional_whole_number, shown, whole_number
from ..devices import HOST, format_size, torch_device
from ..errors import PlanError
from ..quantized.host_kernels import EXACT, HOST_KERNELS, PACKED
from ..quantized.packable import packing_note
from ..quantized.stored import StoredModule, published, stored_names
from .model.tensors import CustomDtype, DtypeLike, dtype_name, named_tensors, normalize_dtype, planned_dtype
from .model.units import (
    UnitProfile,
    combining_module,
    find_no_split_classes,
    growing_layers,
    profile_units,
    split_units,
)
from .trace.dry_run import Phase, SampleInputs, dry_run, read_sample, with_packed
from .trace.events import OUTSIDE, Enter, Event, Leave
from .trace.inputs import LABELS, InputSizes
from .trace.ledger import D, Rounding, replay
from .trace.measured import MeasuredForward
from .trace.trace import InitialStorage, Part, Segment, Trace, renamed
from .trace.uses import FORWARDS
from .trace.workload import Workload, max_context, used_length


@dataclass(frozen=True)
class Profile:
    """The bytes and the work of a model at given shapes.

    Attributes:
        name: class name of the model.
        units: its units in execution order; a unit that does not run by itself precedes the one that follows it.
        workload: the shapes.
        phases: the recorded forwards; empty if they are unknown.
        dtype: dtype that floating point weights are cast to when loaded; None if they keep theirs.
        max_context: tokens the model allows; None if it does not say.
        first: position of the unit with the model's first parameter: transformers takes its device as the model's, and
            `generate` moves the inputs there.
        offload_dtype: dtype that streamed weights are quantised to on the link; None: they are not.
        expert_reuse: share of the experts that a step's routers choose which are in the cache by their habits, as
            `dispatch_stats` counts it; others are there by chance. 0: routers choose at random.
        unknown: a sentence about memory that could not be measured, and what to do; empty if there is none.
        stored_as: the formats that weights are published in, if that is quantised; empty otherwise.
        returning: positions of the units whose outputs are moved to the main device: embeddings, and those whose
            outputs operations between units combine with other tensors. None: not known.
        packing: a sentence about the weights that the host computes packed; empty: it restores all.
        lending: positions of the units whose weights are read by operations between units. Such a unit is on no
            accelerator but the main device.
        growing: positions of the units whose keys and values grow with the context in layers of a cache of transformers
            that can hold them on the host.
        kv_on_host: bytes of each unit's keys and values that lie on the host at full context, where the unit runs on an
            accelerator; empty: of none. The traces of such a profile are without them.
        kv_in_ram: most recent tokens of each sequence whose keys and values on the host are in RAM, older ones being on
            disk; 0: all.
        gathers_kv: attention puts the keys and values of a unit together from pages, beside what the traces have.
        micro_batch: the same model at the rows in which a forward of all rows is computed, several times at once; None:
            it is computed whole.
    """

    name: str
    units: tuple[UnitProfile, ...]
    workload: Workload
    phases: tuple[Phase, ...]
    dtype: str | None = None
    max_context: int | None = None
    first: int = 0
    offload_dtype: str | None = None
    expert_reuse: float = 0.0
    unknown: str = ""
    returning: frozenset[int] | None = None
    stored_as: str = ""
    lending: frozenset[int] = frozenset()
    packing: str = ""
    growing: frozenset[int] = frozenset()
    kv_on_host: tuple[int, ...] = ()
    kv_in_ram: int = 0
    gathers_kv: bool = False
    micro_batch: Profile | None = None

    @property
    def prefill_chunk_size(self) -> int | None:
        """Tokens of each forward over a prompt; None: a prompt is one forward, as that of a model without a cache of
        transformers always is."""
        return self.workload.prefill_chunk_size if any(phase.repeats > 1 for phase in self.phases) else None

    @property
    def inputs(self) -> tuple[InputSizes, ...]:
        """Sizes of the arguments of forwards that memory is known for; of a model that generates, with a loss alone."""
        generates = bool(self.phases) and self.phases[-1].name != "forward"
        found: list[InputSizes] = []
        for sizes in (each for phase in self.phases for each in phase.inputs):
            if sizes not in found and (LABELS in sizes or not generates):
                found.append(sizes)
        return tuple(found)

    @cached_property
    def weights(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(n for n, is_buffer in self._storages.values() if not is_buffer)

    @cached_property
    def buffers(self) -> int:
        """Bytes of all buffers."""
        return sum(n for n, is_buffer in self._storages.values() if is_buffer)

    @cached_property
    def _storages(self) -> dict[int, tuple[int, bool]]:
        found: dict[int, tuple[int, bool]] = {}
        for unit in self.units:
            for storage, spec in unit.storages.items():
                nbytes, is_buffer = found.get(storage, (spec.nbytes, True))
                found[storage] = nbytes, is_buffer and spec.is_buffer
        return found

    @cached_property
    def separate_bytes(self) -> tuple[tuple[tuple[bool, int], ...], ...] | None:
        """Of each unit, (whether they are buffers, bytes) of its parameters and its buffers, in the order in which it
        has the first of each; None if units share tensors, or may be packed."""
        if len(self._storages) < sum(len(unit.storages) for unit in self.units) or self.packing:
            return None
        found: list[tuple[tuple[bool, int], ...]] = []
        for unit in self.units:
            of_kinds: dict[bool, int] = {}
            for spec in unit.storages.values():
                of_kinds[spec.is_buffer] = of_kinds.get(spec.is_buffer, 0) + spec.nbytes
            found.append(tuple(of_kinds.items()))
        return tuple(found)

    @cached_property
    def kv_cache(self) -> tuple[int, ...]:
        """Bytes of KV cache of each unit when the context is full."""
        if not self.phases or self.phases[-1].name == "forward":
            return (0,) * len(self.units)
        alive = self.phases[-1].trace.left_alive()
        return tuple(alive.get(index, 0) for index in range(len(self.units)))

    def without_workspace(self) -> Profile:
        """Return the same profile without the workspace of kernels."""
        inner = None if self.micro_batch is None else self.micro_batch.without_workspace()
        return replace(self, phases=tuple(phase.without_workspace() for phase in self.phases), micro_batch=inner)

    @cached_property
    def activations(self) -> int:
        """Peak bytes of activations beside the final KV cache, when everything executes on one device."""
        return self.dynamic_peaks({}, main=None)[None] - sum(self.kv_cache)

    @cached_property
    def packed_activations(self) -> int:
        """As `activations`, where the host computes all weights packed that it can."""
        if not self.packing:
            return self.activations
        return self.dynamic_peaks({}, main=None, packed=True)[None] - sum(self.kv_cache)

    def dynamic_peaks(
        self,
        execution_devices: Mapping[int, D],
        main: D,
        rounding: Mapping[D, Rounding] | None = None,
        input_device: D | None = None,
        experts: Mapping[tuple[int, int], int] | None = None,
        offloaded: Mapping[int, D] | None = None,
        split: tuple[int, D] | None = None,
        packed: bool = False,
    ) -> dict[D, int]:
        """Return the peak bytes of activations and KV cache on each device, over all phases.

        Args:
            execution_devices: execution device of each unit by its position; units left out execute on `main`.
            main: device of the inputs.
            rounding: bytes that the allocator of a device takes for a number of bytes; others take them as they are.
            input_device: device of the weights of unit `first`; None: `main`.
            experts: slots of each cache of experts, by (unit, position of the experts in it).
            offloaded: device whose memory holds the weights of each unit that has them elsewhere than where it runs.
            split: calls of cached experts with fewer tokens than this are computed in part on this device; None: none.
            packed: the host computes all weights packed that it can.
        """
        sizes = () if rounding is None else tuple(rounding.items())
        slots, away = (() if each is None else tuple(each.items()) for each in (experts, offloaded))
        key = tuple(execution_devices.items()), main, sizes, input_device, slots, away, split, packed
        if key not in self._peaks:
            self._peaks[key] = self._replayed(
                key[:-1], execution_devices, main, rounding, input_device, experts, offloaded, split, packed
            )
        return dict(self._peaks[key])

    @cached_property
    def _peaks(self) -> dict[object, dict[Any, int]]:
        """Results of `dynamic_peaks`: a search asks for the same ones again and again."""
        return {}

    def _replayed(
        self,
        key: tuple[object, ...],
        execution_devices: Mapping[int, D],
        main: D,
        rounding: Mapping[D, Rounding] | None,
        input_device: D | None,
        experts: Mapping[tuple[int, int], int] | None,
        offloaded: Mapping[int, D] | None,
        split: tuple[int, D] | None,
        packed: bool,
    ) -> dict[D, int]:
        peaks: dict[D, int] = {main: 0}
        for recorded in self.phases:
            phase = recorded.packed if packed and recorded.packed is not None else recorded
            # Only `generate` moves inputs: those of a plain forward lie on the main device, and its outputs go there.
            inputs = main if phase.name == "forward" else input_device
            for trace in (phase.trace_on(main), *phase.also):
                known = trace.peaks.get((key, inputs))  # profiles that differ in more than traces share these
                found: dict[D, int] = (
                    replay(trace, execution_devices, main, rounding, inputs, experts, offloaded, split).peak
                    if known is None
                    else known
                )
                trace.peaks[key, inputs] = found
                peaks.update({device: max(peaks.get(device, 0), peak) for device, peak in found.items()})
        return peaks


@torch.inference_mode(False)  # tensors of inference mode cannot be traced
def profile_model(
    model: nn.Module,
    batch_size: int = 1,
    context_length: int | None = None,
    new_tokens: int | None = None,
    dtype: DtypeLike | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    cache: str | None = "dynamic",
    all_logits: bool = False,
    device_type: str = "cpu",
    sample_inputs: SampleInputs | None = None,
    measured: MeasuredForward | None = None,
    host_kernels: str = EXACT,
    padded: bool = True,
    prefill_chunk_size: int | None = None,
    split_blocks: bool = False,
) -> Profile:
    """Return the profile of `model`, without reading or allocating a weight.

    Args:
        model: any module, on any device, also meta; not changed.
        batch_size: sequences at once.
        context_length: tokens of a sequence at its end. None: `DEFAULT_CONTEXT`, or as many as the model allows if
            these are fewer. 0: neither KV cache nor activations are counted.
        new_tokens: number of these that are generated; None: any number, so the prompt may fill the context.
        dtype: dtype that floating point tensors are cast to when loaded; None: they keep theirs.
        no_split_module_classes: names of classes that are not split; None: found automatically.
        special_dtypes: dtype by tensor name; takes precedence over `dtype`.
        cache: "dynamic", "static", or None for a forward without cache.
        all_logits: the prefill returns the logits of every token.
        device_type: kind of device that it will run on ("cpu", "cuda", "virtual"): kernels differ.
        sample_inputs: arguments of forward, for a model whose inputs follow no known convention: a mapping by name, or
            a tuple of positional ones. Their tensors may be on meta.
        measured: the activations of a forward that has run; then there is no dry run.
        host_kernels: "packed": the host computes with quantised weights as they are packed, where it has kernels for
            them; "exact": it restores them.
        padded: memory is enough for padded sequences, too, whose mask takes some; False: for those without padding.
        prefill_chunk_size: tokens of each forward over a longer prompt; None: a prompt is one forward.
        split_blocks: units are as small as possible (see `split_units`); `no_split_module_classes` must be None.

    Raises:
        PlanError: the context is longer than the model allows, or an argument is invalid.
        DeviceError: `device_type` is unknown.
    """
    check_model(model)
    example = read_sample(sample_inputs)
    if example is not None and isinstance(ids := example[1].get("input_ids"), torch.Tensor) and ids.dim() == 2:
        batch_size = ids.shape[0]
    length = used_length(model, optional_whole_number("context_length", context_length))
    generated = optional_whole_number("new_tokens", new_tokens)
    work = Workload(
        whole_number("batch_size", batch_size, least=1),
        length,
        None if generated is None else min(generated, length),
        cache,
        all_logits,
        padded,
        prefill_chunk_size,
    )
    check_choice("host_kernels", host_kernels, HOST_KERNELS)
    packed = host_kernels == PACKED
    packing = packing_note(model) if packed else ""
    if split_blocks and no_split_module_classes is not None:
        raise PlanError(f"split_blocks splits {shown(no_split_module_classes)}, too: give one of the two arguments")
    small = split_units(model) if split_blocks else None
    units = profile_units(model, dtype, special_dtypes, no_split_module_classes, units=small, packed=packed)
    wanted = None if dtype is None else normalize_dtype(dtype)
    phases: list[Phase] = []
    unknown = ""
    if measured is not None:
        phases = [measured.phase(units, max(length, 1))]
        unknown = "activations are those of the first forward; larger inputs take more"
    elif context_length != 0 or example is not None:
        phases = dry_run(model, units, work, torch_device(device_type), _cast(model, wanted), example)
        if packed:
            on_host = dry_run(model, units, work, torch_device(HOST), _cast(model, wanted), example, packed=True)
            phases = with_packed(phases, on_host)
        unknown = _unknown(phases, example is not None)
    order = execution_order(units, phases)
    returning = _returning_units(model, units, phases)
    placed = {index for index, unit in enumerate(units) if unit.tensors}
    lent = {index for phase in phases for index in phase.lent}
    growing = growing_layers(model, [unit.name for unit in units if not unit.is_tensor]) if phases else frozenset()
    return Profile(
        name=type(model).__name__,
        units=tuple(units[index] for index in order),
        workload=work,
        phases=tuple(_renumbered(phase, order, returning, placed) for phase in phases),
        dtype=None if wanted is None else dtype_name(wanted),
        max_context=max_context(model),
        first=order.index(_unit_of_first_parameter(units, model)) if order else 0,
        unknown=unknown,
        returning=frozenset(place for place, index in enumerate(order) if index in returning),
        stored_as=_formats(model),
        lending=frozenset(place for place, index in enumerate(order) if index in lent),
        packing=packing,
        growing=frozenset(place for place, index in enumerate(order) if units[index].name in growing),
    )


def _unknown(phases: Sequence[Phase], sampled: bool) -> str:
    """Return a sentence about the memory that a dry run could not measure; empty if it measured everything."""
    advice = "give sample_inputs, the arguments of its forward, to count all"
    if not phases:
        unknown = "activations and KV cache are not known for this model"
        return (
            f"{unknown}, whose forward needs more than the shapes of sample_inputs"
            if sampled
            else f"{unknown}; {advice}"
        )
    without = next((phase.without for phase in phases if phase.without), "")
    sentences = [f"memory is known for inputs without {without}; {advice}"] if without else []
    grows = max(phase.grows for phase in phases)
    if grows:
        sentences.append(
            f"memory grows by {format_size(grows)} with each forward, as the model's modules keep more each time; "
            f"{FORWARDS} forwards are planned for: clear what they keep after these, or leave more memory free"
        )
    return ". ".join(sentences)


def execution_order(units: Sequence[UnitProfile], phases: Sequence[Phase]) -> list[int]:
    """Return positions of `units` in execution order; a unit that never runs by itself precedes its follower."""
    ran = phases[0].trace.order() if phases else []
    rank = {unit: place for place, unit in enumerate(ran)}
    keys = [0.0] * len(units)
    following = float(len(ran))
    for index in range(len(units) - 1, -1, -1):
        if index in rank:
            following = float(rank[index])
            keys[index] = following
        else:
            keys[index] = following - 0.5
    return sorted(range(len(units)), key=lambda index: keys[index])


def _unit_of_first_parameter(units: Sequence[UnitProfile], model: nn.Module) -> int:
    """Return the position of the unit with the model's first parameter; 0 if the model has none."""
    first = next((name for name, _ in model.named_parameters()), None)
    holders = (index for index, unit in enumerate(units) if any(spec.name == first for spec in unit.tensors))
    return next(holders, 0)


def _cast(model: nn.Module, wanted: torch.dtype | CustomDtype | None) -> dict[int, torch.dtype]:
    """Return the dtype, by `id`, of each tensor that will be cast to a dtype torch can compute in."""
    if not isinstance(wanted, torch.dtype):
        return {}
    kept = stored_names(model)
    tensors = (tensor for name, tensor, is_buffer, _ in named_tensors(model) if not is_buffer and name not in kept)
    return {id(tensor): wanted for tensor in tensors if planned_dtype(tensor.dtype, wanted) == wanted}


def _formats(model: nn.Module) -> str:
    """Return the formats that the model's weights are published in; empty if it holds none as stored."""
    if not any(isinstance(module, StoredModule) for module in model.modules()):
        return ""
    found = published(model)
    return "" if found is None else found.label


def _returning_units(model: nn.Module, units: Sequence[UnitProfile], phases: Sequence[Phase]) -> frozenset[int]:
    """Return the positions in `units` of `Profile.returning`. Of units that did not run in the dry run, they are those
    whose parent may compute with their outputs."""
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = find_no_split_classes(model)
    known = [phase for phase in phases if phase.combined is not None]
    traces = [trace for phase in known for trace in (phase.trace, *phase.also)]
    ran = {id(modules[units[index].name]) for trace in traces for index in trace.forwards()}
    combined = {id(modules[units[index].name]) for phase in known for index in phase.combined or ()}

    def returns(name: str) -> bool:
        if id(modules[name]) in ran:
            return id(modules[name]) in combined
        return combining_module(modules, name, whole) is not None

    with_tensors = ((index, unit) for index, unit in enumerate(units) if unit.tensors and not unit.is_tensor)
    return frozenset(index for index, unit in with_tensors if unit.is_lookup or returns(unit.name))


def _renumbered(phase: Phase, order: Sequence[int], returning: Collection[int], placed: Collection[int]) -> Phase:
    """Return a phase with its units renumbered to `order`, and only those outputs that are moved: of forwards those
    that go to the main device, and those of other methods.

    Units without tensors are not `placed`: they run on the device of their inputs, so their operations count as
    operations between units.
    """
    units = {old: new for new, old in enumerate(order)}
    known: dict[object, Segment] = {}  # layers of one kind share a segment

    def placed_before(held: InitialStorage) -> InitialStorage:
        moved = held.is_output and held.unit in returning
        return replace(held, unit=OUTSIDE if moved else units.get(held.unit, held.unit))

    def renumbered_part(part: Part) -> Part:
        own = [(unit, part.units.get(unit, unit)) for unit in part.segment.units]
        stay, move = (frozenset(unit for unit, its in own if its in chosen) for chosen in (placed, returning))
        key = part.segment, stay, move
        if key not in known:
            known[key] = Segment(_renumbered_events(part.segment.events, units, move, stay))
        return Part(known[key], part.storages, {units[old]: units[new] for old, new in part.units.items()})

    def renumbered(trace: Trace) -> Trace:
        return Trace(initial=map(placed_before, trace.initial), parts=map(renumbered_part, trace.parts))

    return phase.with_traces(renumbered)


def _renumbered_events(
    events: Iterable[Event], units: Mapping[int, int], returning: Collection[int], placed: Collection[int]
) -> Iterator[Event]:
    """Yield events as `_renumbered` has them; its arguments are of the units in these."""
    for event in events:
        if isinstance(event, (Enter, Leave)) and event.unit not in placed:
            continue
        if isinstance(event, Leave) and event.source is None and event.unit not in returning:
            event = Leave(event.unit)
        yield renamed(event, {}, units)
