"""How much memory does a dispatched model take, per device: predicted by its plan, and measured?

Measured are, after loading, the bytes of weights and of allocations on each device, and the peak during a generation
that fills the planned context. On the host the peak is that of the process's resident set, less its size before loading
and less pages of weights on disk, which the kernel may evict at any time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import BenchmarkError, Column, Limit, Report, Table, run_isolated
from .harness.report import Cell

if TYPE_CHECKING:
    from torch import nn

WEIGHTS, LOADED, PEAK = "weights", "allocated after load", "peak of a generation"
ACCELERATOR_ERROR = 0.01
VIRTUAL_SHARE = 0.6

DEVICES = ("cpu", "cuda", "virtual")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="a folder, a Hub id, or llama-1b (default: llama-1b)")
    parser.add_argument("--max-memory", default=None, help="budget per device, as in 0=2GiB,cpu=8GiB (default: free)")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences at once")
    parser.add_argument("--context", type=int, default=None, help="tokens of a sequence at its end (default: 256)")
    parser.add_argument("--dtype", default="auto", help="data type of the weights")


def run(options: argparse.Namespace) -> Report:
    """Load and generate in a separate process; compare its memory with the plan, device by device."""
    from .checkpoints import SPECS, checkpoint

    name = options.model or ("tiny" if options.quick else "llama-1b")
    context = options.context or (32 if options.quick else 256)
    model = str(checkpoint(name, options.workdir)) if name in SPECS or Path(name).exists() else name
    found = run_isolated(
        load_and_generate,
        model=model,
        device=options.device,
        max_memory=options.max_memory,
        batch_size=options.batch_size,
        context=context,
        dtype=options.dtype,
        threads=options.threads,
    )
    rows = [row for device in found["devices"] for row in _rows(device)]
    columns = [Column("device"), Column("what"), Column("predicted", "bytes"), Column("measured", "bytes")]
    columns += [Column("difference", "bytes"), Column("error", "percent"), Column("budget", "bytes")]
    return Report(
        "memory",
        options.device,
        settings={
            "model": Path(model).name,
            "max_memory": options.max_memory,
            "batch_size": options.batch_size,
            "context": context,
            "dtype": options.dtype,
        },
        tables=[Table(f"Memory of {Path(model).name}", columns, rows)],
        limits=[limit for device in found["devices"] for limit in _limits(device)],
        notes=[NOTE_HOST, *found["notes"]],
    )


NOTE_HOST = (
    "cpu: resident set of the process beyond what it was before loading, so it holds what torch and its kernels "
    "allocate beside the model; pages of weights on disk are left out"
)


def _rows(device: dict[str, Any]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for what in (WEIGHTS, LOADED, PEAK):
        if what not in device["measured"]:
            continue
        predicted, measured = device["predicted"][what], device["measured"][what]
        error = (measured - predicted) / predicted if predicted else None
        rows.append([device["name"], what, predicted, measured, measured - predicted, error, device["budget"]])
    return rows


def _limits(device: dict[str, Any]) -> list[Limit]:
    name, predicted, measured = device["name"], device["predicted"], device["measured"]
    same = Limit(f"weights on {name} as predicted", measured[WEIGHTS], "==", predicted[WEIGHTS], "bytes")
    if name in ("cpu", "disk"):
        return [same]
    error = abs(measured[PEAK] - predicted[PEAK]) / max(predicted[PEAK], 1)
    limits = [same, Limit(f"peak on {name} against the plan", error, "<=", ACCELERATOR_ERROR, "percent")]
    if device["budget"] is not None:
        limits.append(Limit(f"peak on {name} against its budget", measured[PEAK], "<=", device["budget"], "bytes"))
    return limits


def load_and_generate(
    model: str,
    device: str,
    max_memory: str | None,
    batch_size: int,
    context: int,
    dtype: str,
    threads: int | None,
) -> dict[str, Any]:
    """Load by plan, generate twice, and return predicted and measured bytes by device. Called in a fresh process."""
    import torch

    from bigmodel.devices import accelerators, max_memory_allocated, memory_allocated, reset_peak_memory
    from bigmodel.dispatch import from_pretrained, get_plan

    from . import models
    from .harness.procfs import missing_counters

    if threads:
        torch.set_num_threads(threads)
    models.warm_up(device=device)
    budgets = _budgets(model, device, max_memory)
    unmeasured = missing_counters()
    measured = [*accelerators(), *([] if unmeasured else ["cpu"])]
    before = {name: memory_allocated(name) for name in measured}
    loaded = from_pretrained(model, max_memory=budgets, dtype=dtype, batch_size=batch_size, context_length=context)
    plan = get_plan(loaded)
    if plan is None:
        raise BenchmarkError(f"{model} was loaded without a plan")
    weights = weights_by_device(loaded)
    held = {name: memory_allocated(name) - before[name] for name in before}
    generate(loaded, batch_size, context, plan.main_device)
    for name in measured:
        reset_peak_memory(name)
    generate(loaded, batch_size, context, plan.main_device)
    peaks = {name: max_memory_allocated(name) - before[name] for name in measured}
    if "cpu" in peaks:
        peaks["cpu"] -= mapped_resident(loaded)
    notes = [*plan.notes, *(f"not measured on this host: {what}" for what in unmeasured)]
    return {"devices": _by_device(plan, weights, held, peaks), "notes": notes}


def _budgets(model: str, device: str, text: str | None) -> dict[Any, Any] | None:
    """Return the budgets; for a virtual accelerator, enable it first, by default with memory for part of the model."""
    from bigmodel.devices import virtual
    from bigmodel.server.loading import parse_max_memory

    budgets = parse_max_memory(text)
    kind = device.partition(":")[0]
    if kind == "virtual":
        if budgets is None:
            total = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
            budgets = {0: int(VIRTUAL_SHARE * total), "cpu": total}
        numbers = [key for key in budgets if isinstance(key, int)]
        virtual.enable(count=max(numbers, default=0) + 1, capacity=[budgets[key] for key in sorted(numbers)])
    elif kind == "cpu" and budgets is None:
        from bigmodel.devices import free_memory_bytes

        budgets = {"cpu": free_memory_bytes("cpu")}
    return budgets


def weights_by_device(model: nn.Module) -> dict[str, int]:
    """Return the bytes of parameters by storage device, tied ones once; views of files count as disk."""
    from bigmodel.checkpoint import mapped_region
    from bigmodel.devices import normalize_device
    from bigmodel.profile import storage_key

    seen: set[object] = set()
    found: dict[str, int] = {}
    for parameter in model.parameters():
        key = storage_key(parameter)
        if key in seen:
            continue
        seen.add(key)
        name = normalize_device(parameter.device)
        if name == "cpu" and mapped_region(parameter) is not None:
            name = "disk"
        found[name] = found.get(name, 0) + parameter.nbytes
    return found


def generate(model: Any, batch_size: int, context: int, main_device: int | str) -> None:
    """Generate from a prompt that fills the context, and from one a token short of it, whose last forward takes the
    token that fills it. The plan is for either."""
    import torch

    from bigmodel.devices import torch_device

    for new in (1, 2):
        prompt = torch.arange(batch_size * (context - new + 1)).reshape(batch_size, -1) % model.config.vocab_size
        with torch.inference_mode():
            model.generate(
                prompt.to(torch_device(main_device)),
                attention_mask=torch.ones_like(prompt).to(torch_device(main_device)),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )


def mapped_resident(model: nn.Module) -> int:
    """Return the bytes of this process's resident set that are pages of weights on disk."""
    from bigmodel.checkpoint import mapped_region

    from .harness.pagecache import resident_bytes

    return sum(resident_bytes(p) for p in model.parameters() if mapped_region(p) is not None)


def _by_device(plan: Any, weights: dict[str, int], held: dict[str, int], peaks: dict[str, int]) -> list[dict[str, Any]]:
    from bigmodel.devices import normalize_device

    found = []
    for key, device in plan.devices.items():
        name = normalize_device(key)
        if not device.total and name not in weights:
            continue
        loaded = device.weights + device.buffers + device.slots
        measured = {WEIGHTS: weights.get(name, 0)}
        if name in peaks:
            measured |= {PEAK: peaks[name]}
        if name not in ("cpu", "disk"):
            measured |= {LOADED: held[name]}
        predicted = {WEIGHTS: device.weights, LOADED: loaded, PEAK: device.total}
        found.append({"name": name, "budget": device.budget, "predicted": predicted, "measured": measured})
    return found
