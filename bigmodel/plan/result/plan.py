"""The plan: one value that the loader, the dispatcher, the server and the benchmarks all read.

Admission control reads the number of concurrent sequences from it (`max_sequences`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...devices import DISK, HOST
from ...errors import PlanError
from ...limits import GRADIENT_BYTES, KV_PAGE, READ_AHEAD_BYTES, READERS, STAGING_BYTES, UNKNOWN_NEW_TOKENS
from ...profile.trace.inputs import InputSizes
from .budgets import Key, is_accelerator
from .expert_split import ExpertSplit
from .speculation import Speculation
from .stages import ResidentStages

FORMAT = 15
"""Format of a plan's JSON, raised whenever a field is added or removed: a plan that lacks one could not be obeyed."""


@dataclass(frozen=True)
class DevicePlan:
    """Predicted peak bytes of one device, by purpose.

    Attributes:
        device: its key, as in the device map.
        budget: bytes it may use; None for no limit.
        weights: parameters that lie on it, tied ones once.
        buffers: buffers that lie on it.
        kv_cache: keys and values of the units that run on it, prompts or steps, at full context.
        kv_gather: the most of these that any one unit has, on an accelerator; not part of the total. A server that
            keeps them in pages gathers those of one layer at once. `activations` hold as many for the planned batch;
            each further sequence takes its share of them beside its share of `kv_cache`.
        kv_slots: the part of `slots` into which keys and values are fetched that lie on the host.
        activations: peak of temporary tensors while units run on it.
        workspace: workspace of kernels at that peak, and of libraries.
        slots: memory in which streamed units take turns; on the host, pages of units on disk that it computes with.
        training: gradients and optimizer state.
        draft: peak of the part that proposes tokens, such as an MTP head, beside its keys and values.
        unused: bytes that its allocator reserves beyond all these, as CUDA's does: ends of segments, and gaps between
            tensors.
        context: bytes beside the total that no tensor gets: of the driver. Budgets do not cover them.
        limited: it keeps to its budget only if its allocator is limited to it, and frees cached memory then:
            `dispatch_model` sets that limit.
    """

    device: Key
    budget: int | None
    weights: int = 0
    buffers: int = 0
    kv_cache: int = 0
    kv_gather: int = 0
    kv_slots: int = 0
    activations: int = 0
    workspace: int = 0
    slots: int = 0
    training: int = 0
    draft: int = 0
    unused: int = 0
    context: int = 0
    limited: bool = False

    @property
    def allocated(self) -> int:
        """Predicted peak of tensors, each rounded as its allocator rounds it."""
        working = self.kv_cache + self.activations + self.workspace
        return self.weights + self.buffers + working + self.slots + self.training + self.draft

    @property
    def total(self) -> int:
        """Predicted peak of what is taken from the device, without its context: the sum of all purposes."""
        return self.allocated + self.unused

    @property
    def free(self) -> int | None:
        """Bytes of the budget that are not used; None without a budget."""
        return None if self.budget is None else self.budget - self.total


@dataclass(frozen=True)
class Part:
    """One unit of the model in the plan.

    Attributes:
        name: module or tensor name; `""` is the whole model.
        device: key of the device that holds its weights.
        runs_on: key of the device on which it runs; streamed if that is an accelerator and `device` is not.
        computed_below: calls of a streamed part with fewer tokens than this (sequences x tokens of each), that is,
            steps of generation, are computed on the host, where its weights are. 0: none.
        bytes: bytes of its weights and buffers.
        reason: reason for its placement.
        kind: class of the module.
        returns: its outputs are moved to the main device, because operations between parts combine them with other
            tensors. Otherwise they stay where the part runs, and the part that takes them brings them. None: not known,
            as in the plan of a given device map: the dispatcher decides by the structure of the model.
        kv_on_host: its keys and values lie on the host, and are fetched ahead of each call to the accelerator that it
            runs on.
        kv_on_disk: bytes of these that lie on disk at full context: those of older positions.
    """

    name: str
    device: Key
    runs_on: Key
    bytes: int
    reason: str
    kind: str = ""
    computed_below: int = 0
    returns: bool | None = None
    kv_on_host: bool = False
    kv_on_disk: int = 0


@dataclass(frozen=True)
class Prediction:
    """Predicted time.

    Attributes:
        prefill: seconds for the whole prompt; None if nothing is generated.
        token: seconds for one step of generation (or for one forward).
        binds: the bottleneck of a step.
        seconds_saved_per_gib: seconds of a step that one more GiB on each device would save.
        token_after_pause: seconds of such a step if each begins so long after the one before that what was queued on
            links has arrived, as where other nodes compute in between; None: `token`.
    """

    prefill: float | None
    token: float
    binds: str
    seconds_saved_per_gib: Mapping[Key, float] = field(default_factory=dict)
    token_after_pause: float | None = None


@dataclass(frozen=True)
class Plan:
    """The storage and execution device of every part of a model, how it is streamed, and the predicted memory and time.

    Made by `plan`, `make_plan` and `plan_training`, and by `dispatch_model` for a given device map. The loader, the
    dispatcher, the server and the benchmarks read everything that decides bytes or seconds here and nowhere else; a
    plan that was changed with `dataclasses.replace` is obeyed, too.

    Attributes:
        model: class of the model.
        strategy: name of the strategy or objective that made it.
        main_device: key of the device that takes the inputs, and runs operations between parts and experts that are
            fetched one by one. What else is streamed may run on other accelerators, too: see `Part.runs_on`.
        devices: by key, in the order of the budgets.
        parts: in the order they run.
        slots: number of slots on each accelerator that parts are streamed to, in which these take turns; one that fewer
            parts are streamed to has as many as these.
        slot_bytes: bytes of the largest slot.
        kv_slots: number of slots on each accelerator in which the keys and values of parts take turns that have them on
            the host.
        kv_in_ram: most recent tokens of each sequence whose keys and values are in RAM, of those that lie on the host;
            those of older ones are in a file of the offload folder. 0: all are in RAM. A server has pages in RAM for
            as many tokens of each planned sequence, whichever these are of.
        offload_dtype: dtype that streamed weights are quantised to on the link, `"int8"` or `"int4"`; None: not at all.
        host_kernels: `"packed"`: of parts that RAM holds and the host computes in every call, weights that its kernels
            take are computed as they are packed; what is copied for that counts as weights instead of stored tensors,
            which stay readable in their file. `"exact"`: they are restored in each forward, bit for bit.
        offload_buffers: buffers of parts off the accelerators lie with their weights and are streamed with them;
            otherwise they lie where the part runs.
        expert_cache: bytes by device key for experts that are fetched one by one to that device.
        expert_split: the rates by which calls of few tokens have the host compute some of the experts that are missing
            in that cache; None: all are fetched.
        expert_reuse: share of the chosen experts that were taken to be in that cache by the habits of routers.
        pinned_memory: bytes of host memory that may be pinned, for a GPU to copy from at full speed.
        resident_limit: upper bound of the process's resident set in bytes; pages of parts on disk that the host
            computes with are dropped after use to keep it. None: free memory is the bound.
        read_ahead_bytes: bytes of the next part on disk that are paged in while one computes.
        staging_bytes: bytes of host memory through which parts on disk reach one accelerator, at most.
        readers: number of threads that read from disk for one accelerator.
        upload_bytes: bytes of pinned memory through which weights reach one accelerator while a checkpoint is loaded.
            They are given back then, before anything runs, and lie within what weights and buffers leave of the host's
            budget. 0: tensors are copied one by one, without it.
        gradient_bytes: bytes of pinned memory through which gradients of streamed parts reach the host. `plan_training`
            counts them; other plans count nothing for training. 0: gradients are copied one by one, without it.
        batch_size: planned number of sequences.
        context_length: planned tokens of a sequence.
        new_tokens: number of these that are generated; None: any number.
        padded: whether sequences may be padded.
        prefill_chunk_size: tokens of each forward in which `generate` runs a longer prompt; None: it is one forward.
        dtype: dtype that weights are cast to; None: they keep theirs.
        prediction: predicted time; None if no time was predicted.
        speculation: predicted seconds of passes in which proposed tokens are verified, by which a server proposes any;
            None: none are asked for.
        stages: predicted seconds of steps on each of several devices that all parts are resident on, by which a server
            has several steps in flight; None: not all are, or no text is generated.
        micro_batch_size: rows in which a forward of more rows is computed, several of them in the stages at once, where
            all parts are resident on several accelerators: each with the bits of a forward of its rows alone; None: a
            forward is computed whole.
        guarded: whether nothing is known of its activations. Then nothing is resident on the accelerators that can be
            streamed, until the first forward of the dispatched model has measured them and a new plan is obeyed.
        inputs: sizes of the arguments of planned forwards, by the argument's name, where these are not those of a
            generation: of each tensor its shape and the bytes of an element, of each number its value.
        notes: notes for the user, such as memory that could not be predicted.
    """

    model: str
    strategy: str
    main_device: Key
    devices: Mapping[Key, DevicePlan]
    parts: tuple[Part, ...]
    slots: int = 0
    slot_bytes: int = 0
    kv_slots: int = 0
    kv_in_ram: int = 0
    offload_dtype: str | None = None
    host_kernels: str = "exact"
    offload_buffers: bool = False
    expert_cache: Mapping[Key, int] = field(default_factory=dict)
    expert_split: ExpertSplit | None = None
    expert_reuse: float = 0.0
    pinned_memory: int = 0
    resident_limit: int | None = None
    read_ahead_bytes: int = READ_AHEAD_BYTES
    staging_bytes: int = STAGING_BYTES
    readers: int = READERS
    upload_bytes: int = STAGING_BYTES
    gradient_bytes: int = GRADIENT_BYTES
    batch_size: int = 1
    context_length: int = 0
    new_tokens: int | None = 0
    padded: bool = True
    prefill_chunk_size: int | None = None
    dtype: str | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None
    stages: ResidentStages | None = None
    micro_batch_size: int | None = None
    guarded: bool = False
    inputs: tuple[InputSizes, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def device_map(self) -> dict[str, Key]:
        """Device key by module or tensor name, in the order the parts run."""
        return {part.name: part.device for part in self.parts}

    @property
    def execution(self) -> dict[str, Key]:
        """Key of the device on which each part runs, by the same names as `device_map`. Those of `computed_below` run
        on the host when called with few tokens."""
        return {part.name: part.runs_on for part in self.parts}

    @property
    def computed_below(self) -> dict[str, int]:
        """By name, for parts that the host computes in calls of few tokens: calls of fewer tokens than this."""
        return {part.name: part.computed_below for part in self.parts if part.computed_below}

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return self.context_length - (self.new_tokens or 0)

    @property
    def kv_on_host(self) -> tuple[str, ...]:
        """Names of the parts whose keys and values lie on the host and are fetched ahead of each call."""
        return tuple(part.name for part in self.parts if part.kv_on_host)

    @property
    def kv_on_disk(self) -> int:
        """Bytes of keys and values on disk at full context."""
        return sum(part.kv_on_disk for part in self.parts)

    @property
    def streamed(self) -> tuple[Part, ...]:
        """The parts that are copied to an accelerator each time they run there."""
        return tuple(part for part in self.parts if is_accelerator(part.runs_on) and part.runs_on != part.device)

    def __str__(self) -> str:
        from .tables import plain_text

        return plain_text(self)

    def to_table(self) -> object:
        """Return the plan as a renderable for `rich.console.Console.print`."""
        from .tables import table

        return table(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the plan as JSON text that `from_json` reads back."""
        prediction = None
        if self.prediction is not None:
            saved = _pairs(self.prediction.seconds_saved_per_gib)
            prediction = {**asdict(self.prediction), "seconds_saved_per_gib": saved}
        content = {
            **vars(self),
            "format": FORMAT,
            "expert_cache": _pairs(self.expert_cache),
            "expert_split": None if self.expert_split is None else asdict(self.expert_split),
            "speculation": None if self.speculation is None else asdict(self.speculation),
            "stages": None if self.stages is None else asdict(self.stages),
            "devices": [{**asdict(device), "total": device.total} for device in self.devices.values()],
            "parts": [asdict(part) for part in self.parts],
            "prediction": prediction,
        }
        return json.dumps(content, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: the text is not a plan.
        """
        from pydantic import TypeAdapter

        try:
            content: dict[str, Any] = json.loads(text)
            written = content.pop("format")
            if written != FORMAT:
                raise PlanError(
                    f"this is a plan of format {written}, and this version reads format {FORMAT}: make a new plan"
                )
            devices = TypeAdapter(list[DevicePlan]).validate_python(
                [{k: v for k, v in device.items() if k != "total"} for device in content.pop("devices")]
            )
            parts = TypeAdapter(tuple[Part, ...]).validate_python(content.pop("parts"))
            prediction = content.pop("prediction")
            if prediction is not None:
                prediction["seconds_saved_per_gib"] = dict(map(tuple, prediction["seconds_saved_per_gib"]))
                prediction = TypeAdapter(Prediction).validate_python(prediction)
            content["notes"] = tuple(content["notes"])
            content["expert_cache"] = dict(map(tuple, content["expert_cache"]))
            by_key = {device.device: device for device in devices}
            return TypeAdapter(cls).validate_python(
                {**content, "devices": by_key, "parts": parts, "prediction": prediction}
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(f"this is not a plan: {error}") from None

    def to_html(self) -> str:
        """Return the plan as an HTML page: a picture of the devices, tables and reasons."""
        from .picture import page

        return page(self)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Write a picture of the devices to `path` and return it: SVG, or `to_html`'s page if it ends in `.html`."""
        from .picture import write

        return write(self, path)

    def max_sequences(self) -> int | None:
        """Return the number of sequences that fit at once: see the function `max_sequences`."""
        return max_sequences(self)

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted tokens per second of a whole job: the prompts of a batch, and all steps after them. None without a
        prediction."""
        if self.prediction is None:
            return None
        if self.prediction.prefill is None:
            return self.batch_size / self.prediction.token
        steps = self.new_tokens or UNKNOWN_NEW_TOKENS
        return self.batch_size * steps / (self.prediction.prefill + (steps - 1) * self.prediction.token)

    def explain(self) -> str:
        """Return the reasons of the plan in sentences."""
        from .tables import explain

        return explain(self)


def _pairs(by_device: Mapping[Key, object]) -> list[list[object]]:
    """Return a mapping by device as a list of pairs: keys of JSON objects are text, which 0 and "0" would share."""
    return [list(item) for item in by_device.items()]


def max_sequences(plan: Plan) -> int | None:
    """Return the number of sequences of the planned context length whose keys and values fit at once.

    Activations are those of the planned batch: more sequences than that are cached, but not run in one batch.

    Returns:
        At least the planned batch; None if no device with a budget holds keys or values.
    """
    found = []
    for device in plan.devices.values():
        tiers = device.device in (HOST, DISK) and plan.kv_on_disk  # what one has no memory for goes to the other
        if (device.kv_cache or device.kv_slots) and device.free is not None and not tiers:
            each = (device.kv_cache + device.kv_gather + device.kv_slots) / plan.batch_size
            found.append(plan.batch_size + int(max(device.free, 0) / each))
    if plan.kv_on_disk:
        found.append(_sequences_of_tiers(plan))
    return min(found, default=None)


def _sequences_of_tiers(plan: Plan) -> int:
    """Return the number of sequences that RAM and the disk hold together: of each, RAM has two pages at least."""
    host, disk = plan.devices[HOST], plan.devices[DISK]
    most = plan.kv_in_ram * plan.batch_size // (2 * KV_PAGE)
    if host.free is not None and disk.free is not None:
        each = (host.kv_cache + disk.kv_cache) / plan.batch_size
        most = min(most, plan.batch_size + int((max(host.free, 0) + max(disk.free, 0)) / each))
    return max(plan.batch_size, most)
