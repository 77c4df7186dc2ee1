"""Verifies a plan: loads and runs the model as planned and compares measured with predicted peaks and times."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..devices import (
    DISK,
    HOST,
    DeviceLike,
    accelerators,
    device_key,
    release_cached_memory,
    reset_peak_memory,
    torch_device,
    virtual,
)
from ..devices.caching import MemoryPeaks, memory_now, memory_peaks
from ..devices.memory import caching_memory
from ..dispatch.pretrained import from_pretrained
from ..plan import Plan, plan
from ..profile.machine.probe import known_machine
from ..profile.machine.timing import synchronize
from ..sources.resolve import open_source
from .peak_rss import PeakRSS, host_bytes, keep_freed_memory, resolution, return_freed_memory_at_once
from .planned_use import PlannedUse, Run, planned_use

BYTES, SECONDS = "bytes", "seconds"
REPEATS = 5
WARM_UP_RUNS = 2
"""Runs before memory is measured: libraries make their permanent allocations in them."""

CONTEXT = 256


@dataclass(frozen=True)
class Finding:
    """One predicted figure of the plan and its measured value.

    Attributes:
        device: the device measured; "" for a figure of the whole model.
        what: name of the quantity.
        unit: "bytes" or "seconds".
        predicted: the value in the plan.
        measured: the measured value; of seconds, the median of the runs.
        spread: the largest deviation of a single run from the median, relative to it: how busy the machine was.
        bound: the value in the plan is not to be passed; it need not be reached.
        resolution: how far off the measured value may be: that of the resident set is counted in pages.
    """

    device: str
    what: str
    unit: str
    predicted: float
    measured: float
    spread: float = 0.0
    bound: bool = False
    resolution: float = 0.0

    def is_past(self, tolerance: float) -> bool:
        """Whether the relative error is larger than `tolerance`, and than what can be measured."""
        return abs(self.error) > tolerance and abs(self.predicted - self.measured) > self.resolution

    @property
    def error(self) -> float:
        """The error of the prediction relative to the measured value; negative if the prediction was too small, and 0
        for a bound that holds."""
        if self.bound and self.measured <= self.predicted:
            return 0.0
        return (self.predicted - self.measured) / self.measured if self.measured else float(self.predicted > 0)


def verify(
    model: str | os.PathLike[str],
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    batch_size: int = 1,
    context_length: int | None = None,
    new_tokens: int = 1,
    dtype: str = "auto",
    objective: str = "latency",
    offload: str = "stream",
) -> tuple[Plan, list[Finding]]:
    """Plan and load `model`, run the planned workload, and measure.

    Text is generated after a prompt that fills the rest of the context; models of other kinds run forward once.

    On the host the resident set is measured, so call this in a process that has allocated little before.

    Args:
        model: a folder or a Hub id.
        max_memory: budgets, as for `plan`.
        batch_size: sequences at once.
        context_length: tokens of a sequence at its end; None: 256, or as many as the model allows.
        new_tokens: how many of these tokens are generated.
        dtype: dtype in which weights are loaded; "auto" keeps the stored one.
        objective: as for `plan`.
        offload: as for `plan`; "auto" also verifies parts that are streamed for prompts and computed in steps.

    Returns:
        The plan, and its predicted and measured figures: peak bytes of each device, seconds of prompt and step.

    Raises:
        PlanError: the model does not fit, or its input format is unknown.
    """
    config = open_source(model).config_dict()  # reports a missing model before anything is measured
    return_freed_memory_at_once()
    _measure_machine()
    _warm_up()
    found = plan(
        model,
        max_memory,
        batch_size=batch_size,
        context_length=_usual_context(config) if context_length is None else context_length,
        new_tokens=new_tokens,
        objective=objective,
        offload=offload,
        dtype=None if dtype == "auto" else dtype,
    )
    gc.collect()
    release_cached_memory()
    before = {name: memory_now(name) for name in accelerators()}
    # With a limit on the resident set of the process, file pages would be evicted during the measurement.
    loaded = from_pretrained(model, replace(found, resident_limit=None), dtype=dtype)
    use = planned_use(loaded, found)
    with torch.no_grad():  # as `generate` itself runs
        memory = _peaks(found, loaded, use, before)
    keep_freed_memory()
    with torch.inference_mode():
        return found, [*memory, *_times(found, use)]


def _usual_context(config: Mapping[str, Any]) -> int:
    """Return `CONTEXT`, or the longest context that the model allows if that is shorter."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    allowed = [sizes.get(name) for name in ("max_position_embeddings", "n_positions")]
    return min([CONTEXT, *(limit for limit in allowed if isinstance(limit, int) and limit > 1)])


def _measure_machine() -> None:
    """Measure this machine, if no profile of it exists, in a subprocess, whose allocations do not affect this one."""
    if known_machine() is None:
        subprocess.run([sys.executable, "-m", "bigmodel", "probe"], check=True, stdout=subprocess.DEVNULL)


def _warm_up() -> None:
    """Run a small model and a large matrix product once, so that libraries make their permanent allocations first."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    large = torch.ones(1024, 1024)
    torch.mm(large, large)
    del large
    model = LlamaForCausalLM(config).eval()
    for name in [HOST, *accelerators()]:
        there = model.to(torch_device(name))
        with torch.inference_mode():
            ids = torch.zeros(1, 4, dtype=torch.long, device=torch_device(name))
            there.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, pad_token_id=0)


def _peaks(found: Plan, model: nn.Module, use: PlannedUse, before: Mapping[str, MemoryPeaks]) -> list[Finding]:
    """Measure the peak memory of every device that the plan uses."""
    for _ in range(WARM_UP_RUNS):
        use.whole()
    gc.collect()
    for name in before:
        reset_peak_memory(name)
    with PeakRSS(any(part.device == DISK for part in found.parts)) as rss:
        use.whole()
    peaks = {name: memory_peaks(name).beyond(before[name]) for name in before}
    findings = [finding for name, peak in peaks.items() for finding in peaks_of_accelerator(found, name, peak)]
    if not virtual.count():  # memory of virtual accelerators is part of the host's resident set
        peak = rss.grown + host_bytes(model, found.device_map) + (use.inputs if found.main_device == HOST else 0)
        host = found.devices.get(HOST)
        if host is not None and host.total:
            # Host slots hold file pages of weights on disk, which `PeakRSS` subtracts.
            findings.append(Finding(HOST, "peak memory", BYTES, host.total - host.slots, peak, resolution=resolution()))
    return findings


def peaks_of_accelerator(found: Plan, name: str, peak: MemoryPeaks) -> list[Finding]:
    """Return the peaks of an accelerator: one number, or three if its allocator caches."""
    planned = found.devices.get(device_key(name))
    if planned is None or not planned.total:
        return []
    caching = caching_memory(name)
    # Libraries took their workspace when they were warmed up.
    workspace = 0 if caching is None else caching.workspace
    allocated = Finding(name, "peak memory", BYTES, planned.allocated - workspace, peak.allocated)
    if caching is None:
        return [allocated]
    requested = Finding(name, "peak memory, requested", BYTES, allocated.predicted, peak.requested, bound=True)
    reserved = Finding(name, "peak memory, reserved", BYTES, planned.total - workspace, peak.reserved, bound=True)
    return [requested, replace(allocated, what="peak memory, allocated"), reserved]


def _times(found: Plan, use: PlannedUse) -> list[Finding]:
    """Measure the seconds of each pass."""
    if found.prediction is None:
        return []
    device = torch_device(found.main_device)
    predicted = [found.prediction.prefill, found.prediction.token][-len(use.passes) :]
    return [
        Finding("", name, SECONDS, seconds, *_median_and_spread(run, device))
        for (name, run), seconds in zip(use.passes.items(), predicted, strict=True)
        if seconds is not None
    ]


def _median_and_spread(work: Run, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of a run, and the largest relative deviation from it."""
    work()
    taken = []
    for _ in range(REPEATS):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    median = statistics.median(taken)
    return median, max(abs(seconds - median) for seconds in taken) / median
