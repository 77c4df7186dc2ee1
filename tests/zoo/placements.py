"""One tiny model on one placement: its outputs, memory and weights, beside the same model that is not dispatched."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from bigmodel import dispatch_model, make_plan, undispatch
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.errors import BudgetError
from bigmodel.plan import Plan
from bigmodel.profile import Profile, profile_model

from .tiny import BATCH, NEW, PROMPT, Outputs, Tiny, tiny

ACCELERATORS = (0, 1)
PLENTY = 2**40
LITTLE_RAM = 2**20
"""RAM of a host that keeps the weights on disk."""

STRICT = ("resident", "RAM", "disk", "two accelerators", "host")
"""Placements on one kind of device."""

MIXED = ("auto", "compute")
"""Placements that compute some parts on the host and others on the accelerator: two kinds of devices."""

PLACEMENTS = (*STRICT, *MIXED)

LEAST_MEASURED = 0.9
"""Least share of the planned bytes that is taken."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest difference of an output that two kinds of devices compute, relative to its largest value."""


@dataclass(frozen=True)
class Examined:
    """What one placement of one model did.

    Attributes:
        differing: how its outputs differ from those of the model that is not dispatched; empty: not at all.
        planned: predicted peak bytes by accelerator.
        measured: measured peak bytes by accelerator.
        budgets: budgets by accelerator.
        restored: after `undispatch` the weights are what they were, under the same names.
        unknown: what the plan notes as unknown; empty: nothing.
        raised: the error that it raised; then nothing else is known.
    """

    differing: str = ""
    planned: Mapping[int, int] = field(default_factory=dict)
    measured: Mapping[int, int] = field(default_factory=dict)
    budgets: Mapping[int, int] = field(default_factory=dict)
    restored: bool = True
    unknown: str = ""
    raised: str = ""

    @property
    def kept(self) -> bool:
        """Whether no accelerator passed its plan, and no plan its budget."""
        return all(self.measured[d] <= self.planned[d] <= self.budgets[d] for d in self.measured)

    @property
    def ratio(self) -> float | None:
        """Measured over planned bytes of all accelerators, or of the one that passed its plan; None for the host."""
        passed = [self.measured[d] / max(self.planned[d], 1) for d in self.measured]
        if not sum(self.planned.values()):
            return None
        return max([*(each for each in passed if each > 1), sum(self.measured.values()) / sum(self.planned.values())])

    @property
    def problems(self) -> list[str]:
        """What is not as it must be, in a few words each."""
        found = [self.raised] if self.raised else []
        if self.differing:
            found.append(self.differing)
        if not self.kept:
            found.append(f"measured {dict(self.measured)}, planned {dict(self.planned)}, budget {dict(self.budgets)}")
        elif self.ratio is not None and self.ratio < LEAST_MEASURED:
            found.append(f"only {self.ratio:.2f} of the plan is taken")
        if not self.restored:
            found.append("weights are not restored")
        if self.unknown:
            found.append(self.unknown)
        return found


@dataclass
class Subject:
    """A tiny model with its profile, and its outputs where it is not dispatched.

    Attributes:
        tiny: the model.
        sample_inputs: inputs that it is profiled with; None: those of its conventions.
    """

    tiny: Tiny
    sample_inputs: Mapping[str, torch.Tensor] | None = None
    _expected: dict[str, Outputs] = field(default_factory=dict)

    @cached_property
    def profile(self) -> Profile:
        """The profile of the model at the shapes that it is used with."""
        shape = {"batch_size": BATCH, "context_length": PROMPT + NEW, "new_tokens": NEW}
        reads_all = self.tiny.used_as == "forward"  # a model that generates is planned for the last token's logits
        return profile_model(
            self.tiny.model, **shape, all_logits=reads_all, device_type="virtual", sample_inputs=self.sample_inputs
        )

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """Its state dict."""
        return {name: tensor.clone() for name, tensor in self.tiny.model.state_dict().items()}

    def expected(self, device: str) -> Outputs:
        """Return the outputs of the model that is not dispatched, on a device."""
        if device not in self._expected:
            self._expected[device] = self._use(copy.deepcopy(self.tiny.model).to(device), device)
        return self._expected[device]

    def _use(self, model: nn.Module, device: str) -> Outputs:
        torch.manual_seed(0)  # some draw random numbers, as for the patches that they leave out
        with torch.inference_mode():
            return self.tiny.use(model, device)

    def plan(self, placement: str) -> Plan:
        """Return the plan of a placement. Where it offloads, less than half of the weights fit the accelerator."""
        if placement == "host":
            return make_plan(self.profile, {"cpu": PLENTY})
        whole = make_plan(self.profile, {0: PLENTY, "cpu": PLENTY})
        if placement == "resident":
            return whole
        others: dict[Any, int] = {"cpu": PLENTY, "disk": 0}
        if placement == "two accelerators":
            others = {1: PLENTY, "cpu": 0, "disk": 0}
        if placement == "disk":
            others = {"cpu": LITTLE_RAM}
        offload = placement if placement in MIXED else "stream"
        made = whole
        for share in (0.6, 0.4, 0.25, 0.1, 0.05):
            budget = int(whole.devices[0].total - share * self.profile.weights)
            try:
                made = make_plan(self.profile, {0: budget, **others}, offload=offload)
            except BudgetError:
                continue
            if _uses(made, placement):
                break
        return made

    def examine(self, placement: str) -> Examined:
        """Plan, dispatch, run and undispatch the model on a placement."""
        made = self.plan(placement)
        device = "cpu" if made.main_device == "cpu" else f"virtual:{made.main_device}"
        expected = self.expected("cpu" if device == "cpu" else "virtual:0")
        with tempfile.TemporaryDirectory() as folder:
            gc.collect()
            held = {index: memory_allocated(index) for index in ACCELERATORS}
            model = dispatch_model(copy.deepcopy(self.tiny.model), made, offload_dir=folder)
            gc.collect()
            for index in held:
                reset_peak_memory(index)
            found = self._use(model, device)
            measured = {index: max_memory_allocated(index) - held[index] for index in held}
            restored = self._is_restored(undispatch(model))
            del model
        used = {index: made.devices[index] for index in ACCELERATORS if index in made.devices}
        return Examined(
            differing=found.difference(expected, TOLERANCES[self.tiny.dtype] if placement in MIXED else 0.0),
            planned={index: plan.total for index, plan in used.items()},
            measured={index: measured[index] for index in used},
            budgets={index: plan.budget or 0 for index, plan in used.items()},
            restored=restored,
            unknown=" ".join(note for note in made.notes if "unknown" in note or "known" in note),
        )

    def _is_restored(self, model: nn.Module) -> bool:
        after = model.state_dict()
        return list(after) == list(self.weights) and all(
            torch.equal(after[name].cpu(), tensor) for name, tensor in self.weights.items()
        )


def examine_all(name: str, class_name: str, dtype: str) -> dict[str, Examined]:
    """Return what the tiny model of an architecture does on every placement.

    Raises:
        NoTinyModelError: it has none.
    """
    return examine_everywhere(Subject(tiny(name, class_name, DTYPES[dtype])))


def examine_everywhere(subject: Subject) -> dict[str, Examined]:
    """Return what a model does on every placement."""
    found = {}
    for placement in PLACEMENTS:
        try:
            found[placement] = subject.examine(placement)
        except TimeoutError:
            raise
        except Exception as error:  # the other placements are still to be tried
            found[placement] = Examined(raised=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return found


def _uses(made: Plan, placement: str) -> bool:
    """Whether a plan does what its placement is named after."""
    if placement == "two accelerators":
        return all(made.devices[index].weights for index in ACCELERATORS)
    if placement in MIXED:
        return made.main_device != "cpu"
    return made.main_device != "cpu" and bool(made.streamed)
