"""Holds a plan to its word: loads by it, runs what it was made for, and sets measured beside predicted."""

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
    max_memory_allocated,
    memory_allocated,
    reset_peak_memory,
    torch_device,
    virtual,
)
from ..dispatch.pretrained import from_pretrained
from ..plan import Plan, plan
from ..profile.machine.probe import known_machine
from ..profile.machine.timing import synchronize
from ..sources.resolve import open_source
from .peak_rss import HostMark, host_bytes, keep_freed_memory, return_freed_memory_at_once
from .planned_use import PlannedUse, Run, planned_use

BYTES, SECONDS = "bytes", "seconds"
REPEATS = 5
SETTLING = 2
"""How often a model is used before its memory is measured: what libraries allocate for ever is there afterwards."""

CONTEXT = 256


@dataclass(frozen=True)
class Finding:
    """One figure of the plan beside what was measured.

    Attributes:
        device: where; "" for what concerns all.
        what: what it is, in words.
        unit: "bytes" or "seconds".
        predicted: what the plan said.
        measured: what was.
    """

    device: str
    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How far the prediction was off, as a share of what was measured; below 0 if it was too small."""
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
    """Plan and load `model`, run what was planned for, and measure.

    Text is generated after a prompt that fills the rest of the context; models of other kinds run forward once.

    To be called in a process that has done little before: on the host it is the resident set that is measured.

    Args:
        model: a folder or a Hub id.
        max_memory: budgets, as for `plan`.
        batch_size: sequences at once.
        context_length: tokens of a sequence at its end; None: 256, or as many as the model allows.
        new_tokens: how many of these are generated.
        dtype: what weights are loaded as.
        objective: as for `plan`.
        offload: as for `plan`; with "auto" also what is streamed for prompts and computed in steps is held to it.

    Returns:
        The plan, and its figures beside what was measured: peak bytes of each device, seconds of prompt and step.

    Raises:
        PlanError: the model does not fit, or what it takes as input is not known.
    """
    config = open_source(model).config_dict()  # a model that is not there is said to be so at once
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
    before = {name: memory_allocated(name) for name in accelerators()}
    # As a bound of the whole process the host's budget would have pages of files dropped meanwhile.
    loaded = from_pretrained(model, replace(found, resident_limit=None), dtype=dtype)
    use = planned_use(loaded, found)
    with torch.no_grad():  # as `generate` itself runs
        memory = _peaks(found, loaded, use, before)
    keep_freed_memory()
    with torch.inference_mode():
        return found, [*memory, *_times(found, use)]


def _usual_context(config: Mapping[str, Any]) -> int:
    """Return a context that is long enough to be worth measuring and that the model allows."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    allowed = [sizes.get(name) for name in ("max_position_embeddings", "n_positions")]
    return min([CONTEXT, *(limit for limit in allowed if isinstance(limit, int) and limit > 1)])


def _measure_machine() -> None:
    """Measure this machine, if that was not done yet, in another process: it would leave its traces in this one."""
    if known_machine() is None:
        subprocess.run([sys.executable, "-m", "bigmodel", "probe"], check=True, stdout=subprocess.DEVNULL)


def _warm_up() -> None:
    """Let a small model and a large product run once, so that what libraries allocate for ever is there before."""
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


def _peaks(found: Plan, model: nn.Module, use: PlannedUse, before: Mapping[str, int]) -> list[Finding]:
    """Measure the highest mark of every device that the plan uses."""
    for _ in range(SETTLING):
        use.whole()
    gc.collect()
    for name in before:
        reset_peak_memory(name)
    with HostMark(any(part.device == DISK for part in found.parts)) as mark:
        use.whole()
    peaks = {name: max_memory_allocated(name) - held for name, held in before.items()}
    if not virtual.count():  # there the host's memory holds the accelerators' too
        peaks[HOST] = (
            mark.grown + host_bytes(model, found.device_map) + (use.inputs if found.main_device == HOST else 0)
        )
    findings = []
    for name, peak in peaks.items():
        planned = found.devices.get(device_key(name))
        if planned is not None and planned.total:
            # Pages of files that weights on disk pass through on the host come and go.
            predicted = planned.total - (planned.slots if name == HOST else 0)
            findings.append(Finding(name, "peak memory", BYTES, predicted, peak))
    return findings


def _times(found: Plan, use: PlannedUse) -> list[Finding]:
    """Measure the seconds of each pass."""
    if found.prediction is None:
        return []
    device = torch_device(found.main_device)
    predicted = [found.prediction.prefill, found.prediction.token][-len(use.passes) :]
    return [
        Finding("", name, SECONDS, seconds, _median(run, device))
        for (name, run), seconds in zip(use.passes.items(), predicted, strict=True)
        if seconds is not None
    ]


def _median(work: Run, device: torch.device) -> float:
    work()
    taken = []
    for _ in range(REPEATS):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
