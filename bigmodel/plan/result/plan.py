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

from ...errors import PlanError
from ...limits import READ_AHEAD_BYTES, READERS, STAGING_BYTES
from .budgets import Key, is_accelerator

FORMAT = 2
"""Format of a plan's JSON, raised whenever a field comes or goes: a plan without one of them could not be obeyed."""


@dataclass(frozen=True)
class DevicePlan:
    """Predicted peak bytes of one device, by purpose.

    Attributes:
        device: its key, as in the device map.
        budget: bytes it may use; None for no limit.
        weights: parameters that lie on it, tied ones once.
        buffers: buffers that lie on it.
        kv_cache: keys and values of the units that run on it, prompts or steps, at full context.
        activations: what comes and goes while units run on it, at its highest.
        workspace: what kernels take for themselves beyond that.
        slots: buffers that streamed units take turns in; on the host, units on disk that it computes with.
        training: gradients, and what the optimizer keeps.
    """

    device: Key
    budget: int | None
    weights: int = 0
    buffers: int = 0
    kv_cache: int = 0
    activations: int = 0
    workspace: int = 0
    slots: int = 0
    training: int = 0

    @property
    def total(self) -> int:
        """Predicted peak: the sum of all purposes."""
        working = self.kv_cache + self.activations + self.workspace
        return self.weights + self.buffers + working + self.slots + self.training

    @property
    def free(self) -> int | None:
        """What is left of the budget; None without one."""
        return None if self.budget is None else self.budget - self.total


@dataclass(frozen=True)
class Part:
    """One unit of the model in the plan.

    Attributes:
        name: module or tensor name; `""` is the whole model.
        device: key of the device that holds its weights.
        runs_on: key of the device on which it runs; streamed if that is an accelerator and `device` is not.
        computed_below: a streamed part's calls of fewer tokens than this (sequences x tokens of each) are computed on
            the host instead, where its weights are: steps of generation, that is. 0: none are.
        bytes: bytes of its weights and buffers.
        reason: why it is there.
        kind: class of the module.
    """

    name: str
    device: Key
    runs_on: Key
    bytes: int
    reason: str
    kind: str = ""
    computed_below: int = 0


@dataclass(frozen=True)
class Prediction:
    """Predicted time.

    Attributes:
        prefill: seconds for the whole prompt; None if nothing is generated.
        token: seconds for one step of generation (or for one forward).
        binds: what the time of a step is spent on first of all.
        seconds_saved_per_gib: what one more GiB on each device would take off a step.
    """

    prefill: float | None
    token: float
    binds: str
    seconds_saved_per_gib: Mapping[Key, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Where every part of a model is held and runs, how it gets there, and what that takes.

    Made by `plan`, `make_plan` and `plan_training`, and by `dispatch_model` for a device map that was given. What
    decides bytes or seconds is read here by the loader, the dispatcher, the server and the benchmarks, and nowhere
    else: a plan that is changed with `dataclasses.replace` is obeyed as it then is.

    Attributes:
        model: class of the model.
        strategy: how it was made.
        main_device: key of the device that takes the inputs and runs what is streamed.
        devices: by key, in the order of the budgets.
        parts: in the order they run.
        slots: how many slots there are on the main device, in which streamed parts take turns.
        slot_bytes: bytes of one slot.
        offload_dtype: what streamed weights are quantised to on their way, `"int8"` or `"int4"`; None: not at all.
        offload_buffers: buffers of parts off the accelerators lie with their weights and are streamed with them;
            otherwise they lie where the part runs.
        expert_cache: bytes of a device, by key, that experts may take which are fetched one by one, for devices they
            are fetched to.
        pinned_memory: bytes of host memory that may be pinned, for a GPU to copy from at full speed.
        resident_limit: bytes of the host that the process may take; pages of parts on disk that the host computes with
            are dropped behind their use for that to hold. None: as many as are free.
        read_ahead_bytes: how much of the next part on disk is brought into host memory while one is computed with.
        staging_bytes: bytes of host memory through which parts on disk reach an accelerator, at most.
        readers: how many threads read from disk at once.
        batch_size: sequences it is made for.
        context_length: tokens per sequence it is made for.
        new_tokens: how many of these are generated; None: any share of them.
        dtype: what weights are cast to; None if they stay as they are.
        prediction: predicted time; None if it was not asked for.
        notes: what the reader should know, such as what could not be predicted.
    """

    model: str
    strategy: str
    main_device: Key
    devices: Mapping[Key, DevicePlan]
    parts: tuple[Part, ...]
    slots: int = 0
    slot_bytes: int = 0
    offload_dtype: str | None = None
    offload_buffers: bool = False
    expert_cache: Mapping[Key, int] = field(default_factory=dict)
    pinned_memory: int = 0
    resident_limit: int | None = None
    read_ahead_bytes: int = READ_AHEAD_BYTES
    staging_bytes: int = STAGING_BYTES
    readers: int = READERS
    batch_size: int = 1
    context_length: int = 0
    new_tokens: int | None = 0
    dtype: str | None = None
    prediction: Prediction | None = None
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
        """For each part that the host computes in calls of few tokens, of fewer than how many, by name."""
        return {part.name: part.computed_below for part in self.parts if part.computed_below}

    @property
    def streamed(self) -> tuple[Part, ...]:
        """The parts that are copied to an accelerator each time they run there."""
        return tuple(part for part in self.parts if is_accelerator(part.runs_on) and part.runs_on != part.device)

    def __str__(self) -> str:
        from .tables import plain_text

        return plain_text(self)

    def to_table(self) -> object:
        """Return the plan as something `rich.console.Console.print` draws."""
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
        from pydantic import TypeAdapter, ValidationError

        try:
            content: dict[str, Any] = json.loads(text)
            written = content.pop("format")
            if written != FORMAT:
                raise PlanError(
                    f"this is a plan of format {written}, and this version reads format {FORMAT}: make it anew"
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
        except (ValidationError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"this is not a plan: {error}") from None

    def to_html(self) -> str:
        """Return the plan as an HTML page: a picture of the devices, the tables, and why."""
        from .picture import page

        return page(self)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Write a picture of the devices to `path` and return it: SVG, or `to_html`'s page if it ends in `.html`."""
        from .picture import write

        return write(self, path)

    def max_sequences(self) -> int | None:
        """Return how many sequences fit at once: see the function `max_sequences`."""
        return max_sequences(self)

    def explain(self) -> str:
        """Return, in sentences, why the plan is as it is."""
        from .tables import explain

        return explain(self)


def _pairs(by_device: Mapping[Key, object]) -> list[list[object]]:
    """Return a mapping by device as a list of pairs: keys of JSON objects are text, which 0 and "0" would share."""
    return [list(item) for item in by_device.items()]


def max_sequences(plan: Plan) -> int | None:
    """Return how many sequences of the plan's context length fit at once, keys and values of all of them resident.

    Activations are those of the batch that was planned for: more sequences than that are held, not run at once.

    Returns:
        At least the planned batch; None if no device with a budget holds keys or values.
    """
    found = []
    for device in plan.devices.values():
        if device.kv_cache and device.free is not None:
            each = device.kv_cache / plan.batch_size
            found.append(plan.batch_size + int(max(device.free, 0) / each))
    return min(found, default=None)
