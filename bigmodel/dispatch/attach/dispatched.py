"""The record of a dispatched model: attachments, streamers, readers and caches, and how to remove them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ...devices import DISK, HOST, is_accelerator
from ...devices.caching import hold_to, memory_peaks
from ...devices.scripts import OverriddenScripts
from ...errors import DispatchError
from ...plan import Plan
from ...plan.result.forwards import forwards_at_once
from ...plan.result.speculation import SPECULATION
from ...plan.result.stages import STAGES
from ...quantized.host_kernels import PackedWeight
from ...quantized.linear import QuantizedLinear
from ..experts.cache import ExpertCache, expert_stats
from ..mapped.readahead import ReadAhead
from ..placement.aligned import put_back
from ..placement.options import Options
from ..placement.resolve import ResolvedMap
from ..streaming.admission import Admission
from ..streaming.host_kv import KVFetchers
from ..streaming.streamer import Streamer
from ..streaming.transform_budgets import TransformBudgets
from ..streaming.unplanned_calls import of_part, of_plan
from ..transfer.stages import StagePipeline
from ..weights.autograd_functions import CopiesForFunctions
from ..weights.block import Registry
from ..weights.outside_use import is_marked, mark_lent, mark_offloaded, note_optimizer_step, unmark_offloaded
from ..weights.packing import WeightError
from ..weights.parameters import Reference, take_over
from ..weights.visits import StreamStats, together
from . import assigning, copying_parts, generation
from .additions import Additions
from .attached_forward import AttachedForward, Parts, innermost_running
from .decoding import METHOD, PREFILL, DecodeAsResident, PrefillInChunks
from .mark import ATTRIBUTE as ATTRIBUTE
from .micro_batches import MicroBatches
from .refusals import TRACED, NotCopied, RefuseConversion, RefuseTracing
from .untied import UntiedWeights

GUARDS = (RefuseConversion, RefuseTracing, assigning.CopiesAssigned, copying_parts.CopyPart)
"""Classes of what takes the place of methods of all modules."""

DISPATCH_ATTRIBUTES = (ATTRIBUTE, METHOD, PREFILL, "hf_device_map", "dispatch_stats", "__deepcopy__")
"""Names that dispatching adds to the model's own attributes."""


def accelerators_first(places: Mapping[str, Any]) -> dict[str, Any]:
    """Return a device map with accelerators first, then the host: pipelines of transformers make their inputs on the
    first device of a model's map, and "disk" is none."""
    tiers = {HOST: 1, DISK: 2}
    return dict(sorted(places.items(), key=lambda place: tiers.get(place[1], 0)))


class Dispatched(NotCopied):
    """Everything that dispatching added to one model, so that it can be removed again.

    Args:
        main_device: Execution device of its offloaded modules.
        resolved: The resolved device map and its plan.
        options: The options of the dispatch.
        names: The names of its tensors; those added later are in no block (`additions`).
    """

    def __init__(
        self, main_device: torch.device, resolved: ResolvedMap, options: Options, names: frozenset[str]
    ) -> None:
        self.main_device = main_device
        self.resolved = resolved
        self.options = options
        self.names = names
        self.attachments: dict[str, AttachedForward] = {}
        self.outside: list[AttachedForward] = []
        """Attachments of methods that other modules call, of parts of units or beside ``forward``: they move inputs."""
        self.streamers: list[Streamer] = []
        self.readers: list[ReadAhead] = []
        self.expert_caches: list[ExpertCache] = []
        self.quantization_errors: dict[str, WeightError] = {}
        """The error of each weight that is quantised for the link, by name."""
        self.ties: dict[str, str] = {}
        """For each further name of a tied tensor, its first name."""
        self.references: list[Reference] = []
        """References to weights from outside their modules."""
        self.lent: list[torch.Tensor] = []
        """Tensors that code outside their unit may compute with, on another device."""
        self.untied: UntiedWeights | None = None
        """Weights that were tied and lie on two devices; None: the model runs on one."""
        self.aligned: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors on disk that have a copy in memory, and their views of the file."""
        self.packed: dict[str, tuple[QuantizedLinear, PackedWeight]] = {}
        """Layers that kernels of the host compute, each with its packed weight, by name."""
        self.on_detach: Callable[[], None] | None = None
        """Called when the attachments are removed."""
        self.releases: list[Callable[[], object]] = []
        """Take back the limits that hold allocators to the plan, and the hook of optimizers."""
        self.kv: KVFetchers | None = None
        """Fetch keys and values that lie on the host; None: none do."""
        self.stages: StagePipeline | None = None
        """The stages of a model whose parts are all resident on one of several accelerators; None of others."""
        self.micro_batches: MicroBatches | None = None
        """Computes the forward of a model that has stages; None of others."""
        self.admission: Admission | None = None
        """Has calls wait until budgets that were given have room for them; None: nothing waits."""
        self.forget: Callable[[], None] | None = None
        """Tells the observer of the options that dispatching is undone."""

    @property
    def plan(self) -> Plan:
        """The plan that the model was dispatched by."""
        return self.resolved.plan

    def follow_optimizers(self) -> None:
        """Have blocks fetched again that an optimizer has written to, and untied weights not be trained apart."""
        if self.streamers or self.expert_caches:
            self._until_undispatched(register_optimizer_step_post_hook(note_optimizer_step))
        if self.untied:
            self._until_undispatched(self.untied.watch())

    def _follow_functions(self, model: nn.Module) -> None:
        """Have functions of TorchScript and of autograd compute with copies of offloaded weights, as operations do."""
        if any(map(is_marked, (*model.parameters(), *model.buffers()))):
            self._until_undispatched(OverriddenScripts(is_marked))
            self._until_undispatched(CopiesForFunctions())

    def _until_undispatched(self, handle: RemovableHandle | OverriddenScripts | CopiesForFunctions) -> None:
        # Also removed when the model is deleted without being undispatched.
        release = weakref.finalize(self, handle.remove)
        release.atexit = False
        self.releases.append(release)

    def hold_allocators(self) -> None:
        """Let allocators that would cache more than the plan's budgets give cached memory back before that."""
        for device in self.plan.devices.values():
            if device.limited and device.budget is not None and is_accelerator(device.device):
                # Also taken back when the model is deleted without being undispatched.
                release = weakref.finalize(self, hold_to(device.device, device.budget))
                release.atexit = False
                self.releases.append(release)

    def forward_of(self, name: str, module: nn.Module) -> AttachedForward:
        """Return the attachment of the module `name`; create it on first use."""
        if name not in self.attachments:
            self.attachments[name] = AttachedForward(module, None, None)
        return self.attachments[name]

    def attach(self, model: nn.Module) -> None:
        """Put all attachments in place and mark `model` as dispatched."""
        self._admit(model)
        for attachment in (*self.attachments.values(), *self.outside):
            attachment.attach()
        self._mark_offloaded(model)
        mark_lent(self.lent)
        self._follow_functions(model)
        self._find_additions(model)
        self._limit_transforms(model)
        self.follow_optimizers()
        model.__dict__[ATTRIBUTE] = self
        model.__dict__["hf_device_map"] = accelerators_first(self.resolved.keys)
        model.__dict__["dispatch_stats"] = self.stats
        if hasattr(type(model), METHOD):
            model.__dict__[METHOD] = DecodeAsResident(model, self.main_device)
        if self.plan.prefill_chunk_size is not None and hasattr(type(model), PREFILL):
            model.__dict__[PREFILL] = PrefillInChunks(model, self.plan.prefill_chunk_size)

    def _mark_offloaded(self, model: nn.Module) -> None:
        """Make host weights that are streamed or looked up in usable by code outside their modules (`outside_use`)."""
        if not is_accelerator(self.main_device):
            return
        # torch's encoder makes no nested tensors of padded batches if its first layer has tensor subclasses.
        probed = {
            id(layer)
            for each in model.modules()
            if isinstance(each, nn.TransformerEncoder) and getattr(each, "use_nested_tensor", True)
            for layer in each.layers[:1]
        }
        for cache in self.expert_caches:
            mark_offloaded(tensor.value for layer in cache.layers for tensor in layer.fused.tensors)
        for attachment in self.attachments.values():
            module = attachment.module
            if attachment.weights_on_host:
                mark_offloaded((*module.parameters(), *module.buffers()))
            streamed = [block for streamer, block in attachment.blocks if is_accelerator(streamer.device)]
            if attachment.host_or_device is None and id(module) not in probed:
                mark_offloaded(tensor.value for block in streamed for tensor in block.tensors)
            else:
                for block in streamed:
                    block.is_plain = True

    def _limit_transforms(self, model: nn.Module) -> None:
        """Hold transformed calls of the model to the budgets of its plan, and calls beyond it to budgets that were
        given: beside the plan's own share of what is free, the rest may be used."""
        if not self.streamers:
            return
        budgets = TransformBudgets(self.plan)
        for streamer in self.streamers:
            streamer.transform_budgets = budgets
        for start in (*self.attachments.values(), *self.outside):
            is_whole = start.module is model
            if is_whole:
                start.transform_budgets = budgets
            if is_whole and start.method == "forward":
                if self.resolved.are_budgets_given:
                    start.unplanned = of_plan(self.plan, start)
            elif start.admission is not None and start.method != generation.METHOD:
                calls = of_part(self.plan, start)
                start.unplanned_part = None if calls is None else (budgets, calls)

    def _admit(self, model: nn.Module) -> None:
        """Have calls of the model and of its parts wait until budgets that were given have room for them."""
        if not self.attachments or not is_accelerator(self.main_device):
            return
        # Of a guarded plan nothing is known yet: its guard admits one call at a time.
        most = forwards_at_once(self.plan) if self.resolved.are_budgets_given and not self.plan.guarded else None
        if most is None:
            return
        self.admission = Admission(most)
        own = any(each.module is model and each.method == generation.METHOD for each in self.outside)
        if not own and callable(getattr(type(model), generation.METHOD, None)):
            self.outside.append(generation.Generation(model, self.plan))
        for each in (*self.attachments.values(), *self.outside):
            each.admission = self.admission

    def _find_additions(self, model: nn.Module) -> None:
        """Have calls of the model look for tensors that were added to it."""
        offloads = any(each.blocks or each.weights_on_host for each in self.attachments.values())
        if not offloads or not is_accelerator(self.main_device):
            return
        parts = Parts(model, Additions(model, self.attachments, self.main_device).find)
        for start in (self.attachments[""], *(each for each in self.outside if each.module is model)):
            start.parts = parts

    def observe(self, model: nn.Module) -> None:
        """Tell the observer of the options that `model` has been dispatched."""
        if self.options.observer is not None:
            self.forget = self.options.observer(model)

    def guard(self, model: nn.Module) -> None:
        """Refuse to move, cast or trace `model` or any part of it, but for parts cast in their own forward; have
        weights that are loaded stay on their devices, and parts copied as plain modules."""

        def computing_on(module: nn.Module) -> torch.device | None:
            running = innermost_running(module)
            return None if running is None else running.device

        streamed = {
            (id(registry), key)
            for attachment in self.attachments.values()
            for _, block in attachment.blocks
            for tensor in block.tensors
            for registry, key in tensor.owners
        }
        devices = {self.main_device, *(parameter.device for parameter in islice(model.parameters(), 1))}
        for module in model.modules():
            module.__dict__["_apply"] = RefuseConversion(module, devices, computing_on, streamed)
            if is_accelerator(self.main_device):
                module.__dict__[TRACED] = RefuseTracing()
            if assigning.METHOD not in module.__dict__:
                module.__dict__[assigning.METHOD] = assigning.CopiesAssigned(module)
            if not hasattr(module, copying_parts.METHOD):
                part = copying_parts.CopyPart(module, self.refuse_while_running)
                module.__dict__[copying_parts.METHOD] = part

    def stats(self) -> dict[str, Any]:
        """Return transfer counters by target: bytes, fetches, hits, misses, seconds waited.

        Targets are the accelerators, each with the counters of its own link; ``"cpu"``, for weights on disk that the
        host computes with; ``"experts"``, for experts that are fetched one by one; and ``"kv"``, for keys and values
        that lie on the host, with the bytes that RAM has for them now (`held_in_ram`) and those on disk
        (`held_on_disk`). ``"stages"`` are seconds of each accelerator while a server had several steps in flight:
        `active_seconds` in all, `busy_seconds` of them with a step in its stages, and `idle_share`, the share without.
        ``"speculation"`` are no counters, but what the plan says of tokens that are proposed:
        `most` of them for each sequence of a step, the number that it is fastest to propose (`tokens`; 0: none), for
        the planned number of sequences, and how many times faster that is (`gain`). Where weights are quantised for
        the link, the counters include the relative errors of all of them: `quantization_error_mean` and
        `quantization_error_max`. Those of accelerators include the peak
        of the device's memory in this process: `peak_requested` by tensors, `peak_allocated` and `peak_reserved` for
        them by its allocator.
        """
        tiers: dict[str, list[StreamStats]] = {}
        for streamer in self.streamers:
            tiers.setdefault(str(streamer.device), []).append(streamer.stats)
        for reader in self.readers:
            tiers.setdefault(HOST, []).append(reader.stats)
        counters: dict[str, Any] = {device: together(stats) for device, stats in tiers.items()}
        for device in filter(is_accelerator, counters):
            counters[device].update({f"peak_{name}": value for name, value in vars(memory_peaks(device)).items()})
        errors = [error.relative for error in self.quantization_errors.values()]
        if errors:
            mean = {"quantization_error_mean": sum(errors) / len(errors), "quantization_error_max": max(errors)}
            for streamer in self.streamers:
                counters[str(streamer.device)].update(mean)
        if self.kv is not None and (stats := self.kv.stats()):
            counters["kv"] = {**together(stats), **self.kv.held()}
        if self.expert_caches:
            counters["experts"] = expert_stats(self.expert_caches)
        if self.plan.speculation is not None:
            counters[SPECULATION] = self.plan.speculation.figures(self.plan.batch_size)
        if self.stages is not None and self.stages.times.steps:
            counters[STAGES] = self.stages.times.figures()
        return counters

    def refuse_while_running(self) -> None:
        """Raise DispatchError if a forward, in any thread, is using streamed weights."""
        in_use = sum(streamer.in_use for streamer in self.streamers) + sum(cache.in_use for cache in self.expert_caches)
        if in_use or (self.admission is not None and self.admission.waiting):
            raise DispatchError(
                "a forward of this model is running, in this thread or another: undispatch it, or dispatch it again, "
                "after that forward has returned"
            )

    def detach(self, model: nn.Module) -> None:
        """Restore every module's own forward and `model`'s own attributes."""
        if self.on_detach is not None:
            self.on_detach()
        if self.forget is not None:
            self.forget()
        for release in self.releases:
            release()
        for attachment in (*self.attachments.values(), *self.outside):
            attachment.detach()
        unmark_offloaded((*model.parameters(), *model.buffers(), *self.lent))
        self.lent.clear()
        for tensor, view in self.aligned:
            put_back(tensor, view)
        self.aligned.clear()
        self.unpack()
        for module in model.modules():
            for name in [name for name, value in module.__dict__.items() if isinstance(value, GUARDS)]:
                del module.__dict__[name]
        for name in DISPATCH_ATTRIBUTES:
            model.__dict__.pop(name, None)

    def unpack(self) -> None:
        """Have packed layers restore their weights again."""
        for layer, _ in self.packed.values():
            layer.packed = None
        self.packed.clear()

    def release(self) -> None:
        """Release device memory and threads, after `detach`."""
        self.attachments.clear()
        self.outside.clear()
        self.streamers.clear()
        self.readers.clear()
        self.expert_caches.clear()


def dispatched(model: nn.Module) -> Dispatched | None:
    """Return the dispatch record of `model`; None if it is not dispatched."""
    found: Dispatched | None = model.__dict__.get(ATTRIBUTE)
    return found


def quantization_errors(model: nn.Module) -> dict[str, WeightError]:
    """Return the error of each weight that a dispatched model quantises for the link (`offload_dtype`), by name."""
    found = dispatched(model)
    return {} if found is None else dict(found.quantization_errors)


class UndoLog:
    """Records every tensor that was replaced in a model, so that a failure leaves the model as it was."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Registry, str, torch.Tensor]] = []
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._taken_over: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take_over(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        """Have `parameter` hold what `value` does, if that can be (`parameters.take_over`); return whether it can."""
        done = take_over(parameter, value)
        if done:
            self._taken_over.append((parameter, value))
        return done

    def replace_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Give `tensor` other memory."""
        self._data.append((tensor, tensor.data))
        tensor.data = data

    def replace(self, registry: Registry, key: str, tensor: torch.Tensor) -> None:
        """Replace the tensor under `key` in `registry` by `tensor`."""
        self._replaced.append((registry, key, registry[key]))
        registry[key] = tensor

    def undo(self) -> None:
        """Restore all replaced tensors, in reverse order."""
        for registry, key, tensor in reversed(self._replaced):
            registry[key] = tensor
        for changed, data in reversed(self._data):
            with torch.inference_mode(changed.is_inference()):
                changed.data = data
        for parameter, value in reversed(self._taken_over):
            take_over(parameter, value)
