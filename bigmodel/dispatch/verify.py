"""Holds a plan to its word: loads by it, runs what it was made for, and sets measured beside predicted."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint import mapped_region
from ..devices import (
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
from ..errors import PlanError
from ..plan import Plan, plan
from ..profile import storage_key
from ..profile.probe import known_machine
from ..profile.stopwatch import synchronize
from .pretrained import from_pretrained

BYTES, SECONDS = "bytes", "seconds"
REPEATS = 5


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
    context_length: int = 256,
    new_tokens: int = 1,
    dtype: str = "auto",
    objective: str = "latency",
) -> tuple[Plan, list[Finding]]:
    """Plan and load `model`, generate `new_tokens` after a prompt that fills the rest of the context, and measure.

    To be called in a process that has done little before: on the host it is the resident set that is measured.

    Args:
        model: a folder or a Hub id.
        max_memory: budgets, as for `plan`.
        batch_size: sequences at once.
        context_length: tokens of a sequence at its end.
        new_tokens: how many of these are generated.
        dtype: what weights are loaded as.
        objective: as for `plan`.

    Returns:
        The plan, and its figures beside what was measured: peak bytes of each device, seconds of prompt and step.

    Raises:
        PlanError: the model does not generate text, or does not fit.
    """
    _measure_machine()
    _warm_up()
    found = plan(
        model,
        max_memory,
        batch_size=batch_size,
        context_length=context_length,
        new_tokens=new_tokens,
        objective=objective,
        dtype=None if dtype == "auto" else dtype,
    )
    names = [*accelerators(), HOST]
    gc.collect()
    before = {name: memory_allocated(name) for name in names}
    loaded = from_pretrained(
        model, dict(found.device_map), dtype=dtype, main_device=found.main_device, max_memory=max_memory
    )
    if not loaded.can_generate() or getattr(loaded.config, "is_encoder_decoder", False):
        raise PlanError(f"{type(loaded).__name__} is no decoder that generates text; only such models are verified")
    findings = _times(found, loaded)
    return_freed_memory_at_once()
    generate(loaded, found)
    gc.collect()
    return_freed_memory_at_once()
    # On the host the interpreter has grown by what it imported and planned: tensors are counted, and the growth beyond.
    before[HOST] = memory_allocated(HOST) - mapped_resident(loaded) - host_bytes(loaded)
    for name in names:
        reset_peak_memory(name)
    generate(loaded, found)
    for name in names:
        if name == HOST and virtual.count():
            continue  # there the host's memory holds the accelerators' too
        peak = max_memory_allocated(name) - before[name] - (mapped_resident(loaded) if name == HOST else 0)
        planned = found.devices.get(device_key(name))
        if planned is not None and planned.total:
            findings.insert(0, Finding(name, "peak memory", BYTES, planned.total, peak))
    return found, findings


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


def _times(found: Plan, model: nn.Module) -> list[Finding]:
    """Measure the seconds of the prompt and of a step."""
    if found.prediction is None:
        return []
    device = torch_device(found.main_device)
    prompt = found.context_length - (found.new_tokens or 0)
    ids = torch.zeros(found.batch_size, max(prompt, 1), dtype=torch.long, device=device)
    findings = []

    def forward(tokens: torch.Tensor, cache: Any = None) -> Any:
        return model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    with torch.inference_mode():
        if found.prediction.prefill is not None:
            measured = _median(lambda: forward(ids), device)
            findings.append(Finding("", "prompt", SECONDS, found.prediction.prefill, measured))
        cache = forward(ids)
        measured = _median(lambda: forward(ids[:, :1], cache), device)
        findings.append(Finding("", "step", SECONDS, found.prediction.token, measured))
    return findings


def _median(work: Callable[[], object], device: torch.device) -> float:
    work()
    taken = []
    for _ in range(REPEATS):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def generate(model: Any, found: Plan) -> None:
    """Run what the plan was made for, up to the last token of its context."""
    new_tokens = found.new_tokens or 1
    device = torch_device(found.main_device)
    prompt = torch.arange(found.batch_size * (found.context_length - new_tokens)).reshape(found.batch_size, -1)
    ids = (prompt % model.config.get_text_config().vocab_size).to(device)
    # The token that is chosen last is not fed to the model; the text ends with an id that never comes.
    asked = {"max_new_tokens": new_tokens + 1, "eos_token_id": 2**31, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **asked)


def return_freed_memory_at_once() -> None:
    """Have the C library hand freed memory back to the system, so that the resident set says what is in use."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            trim_threshold, mmap_threshold = -1, -3
            libc.mallopt(trim_threshold, 0)
            libc.mallopt(mmap_threshold, 2**16)
            libc.malloc_trim(0)


def host_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers that lie in host memory, tied ones once; views of files not."""
    tensors = {storage_key(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return sum(t.nbytes for t in tensors.values() if t.device.type == HOST and mapped_region(t) is None)


def mapped_resident(model: nn.Module) -> int:
    """Return how many bytes of the resident set are pages of weights on disk, which the system may take back."""
    return sum(_resident(parameter) for parameter in model.parameters() if mapped_region(parameter) is not None)


def _resident(tensor: torch.Tensor) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = tensor.data_ptr() // page, (tensor.data_ptr() + tensor.nbytes - 1) // page
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = os.pread(pagemap.fileno(), 8 * (last - first + 1), 8 * first)
    return sum(byte >> 7 for byte in entries[7::8]) * page
