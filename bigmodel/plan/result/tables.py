"""A plan as text: tables, and sentences with its reasons."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...devices import HOST, format_size
from .budgets import Key, is_accelerator
from .plan import Part, Plan

PLAIN_WIDTH = 110


def table(plan: Plan) -> RenderableType:
    """Return the plan as a rich renderable: its parts, its devices, its predicted time, its notes."""
    blocks: list[RenderableType] = [_heading(plan), _parts(plan), _devices(plan)]
    if plan.prediction is not None:
        blocks.append(_time(plan))
    blocks += [Text(f"note: {note}") for note in (*_speculation(plan), *_stages(plan), *plan.notes)]
    return Group(*blocks)


def plain_text(plan: Plan) -> str:
    """Return the tables as text without colour."""
    stream = io.StringIO()
    Console(file=stream, width=PLAIN_WIDTH, color_system=None).print(table(plan))
    return stream.getvalue().rstrip()


def explain(plan: Plan) -> str:
    """Return sentences: the reason for each part's place, the memory of each device, the time that more would save."""
    return "\n".join(
        [
            *_part_sentences(plan),
            *_device_sentences(plan),
            *_time_sentences(plan),
            *_speculation(plan),
            *_stages(plan),
            *plan.notes,
        ]
    )


def _heading(plan: Plan) -> Text:
    counted = any(device.activations for device in plan.devices.values())
    shape = f"batch {plan.batch_size}" if counted or plan.context_length else "weights only"
    if plan.context_length:
        shape += f", context {plan.context_length}"
    if plan.prefill_chunk_size is not None:
        shape += f", prompts in chunks of {plan.prefill_chunk_size}"
    return Text(f"{plan.model}: {shape}, dtype {plan.dtype or 'as stored'}, strategy {plan.strategy}")


def _parts(plan: Plan) -> Table:
    drawn = Table()
    drawn.add_column("part")
    drawn.add_column("device")
    drawn.add_column("runs on")
    drawn.add_column("bytes", justify="right")
    drawn.add_column("reason")
    for run in runs_of(plan.parts):
        nbytes = sum(part.bytes for part in run)
        drawn.add_row(label_of(run), str(run[0].device), _where(run), format_size(nbytes), run[0].reason)
    return drawn


def _where(run: Sequence[Part]) -> str:
    devices = ", ".join(dict.fromkeys(str(part.runs_on) for part in run))
    if run[0].kv_on_host:
        return f"{devices}; KV in RAM" + (" and on disk" if run[0].kv_on_disk else "")
    if not run[0].computed_below:
        return devices
    return f"{devices}; {HOST} below {run[0].computed_below} tokens"


def _devices(plan: Plan) -> Table:
    drawn = Table()
    drawn.add_column("device")
    purposes = ["weights", "buffers", "kv_cache", "activations", "slots", "total"]
    for name, before in (("workspace", -2), ("training", -1), ("draft", -1), ("unused", -1)):
        if any(getattr(device, name) for device in plan.devices.values()):
            purposes.insert(before, name)
    for name in [*purposes, "budget", "free"]:
        drawn.add_column("KV cache" if name == "kv_cache" else name, justify="right")
    for device in plan.devices.values():
        numbers = [getattr(device, name) for name in purposes]
        budget = "no limit" if device.budget is None else format_size(device.budget)
        free = "-" if device.free is None else format_size(device.free)
        shown = [format_size(number) if number else "-" for number in numbers]
        drawn.add_row(str(device.device), *shown, budget, free)
    return drawn


def _time(plan: Plan) -> Text:
    assert plan.prediction is not None
    prefill = "" if plan.prediction.prefill is None else f"prefill {plan.prediction.prefill:.3g} s, "
    step = f"{plan.prediction.token:.3g} s per step ({plan.batch_size / plan.prediction.token:.3g} per second)"
    job = f", {plan.tokens_per_second:.3g} tokens per second in all" if plan.strategy == "throughput" else ""
    return Text(f"predicted: {prefill}{step}{job}; bound by {plan.prediction.binds}")


def _part_sentences(plan: Plan) -> Iterator[str]:
    for run in runs_of(plan.parts):
        yield f"{label_of(run)}: {run[0].reason}."


def _device_sentences(plan: Plan) -> Iterator[str]:
    for device in plan.devices.values():
        purposes = {
            "weights": device.weights,
            "buffers": device.buffers,
            "KV cache": device.kv_cache,
            "activations": device.activations,
            "workspace of kernels": device.workspace,
            _slots_on(plan, device.device): device.slots - device.kv_slots,
            f"{plan.kv_slots} slots for keys and values": device.kv_slots,
            "gradients and optimizer state": device.training,
            "for the part that proposes tokens": device.draft,
            "that the allocator reserves beyond tensors": device.unused,
        }
        used = ", ".join(f"{format_size(nbytes)} {name}" for name, nbytes in purposes.items() if nbytes)
        left = "" if device.free is None else f"; {format_size(device.free)} of its budget stay free"
        yield f"Device {device.device} holds {used or 'nothing'}{left}."
        if device.context:
            yield f"Beside that, device {device.device} needs {format_size(device.context)} for its driver's context."
        if device.limited:
            yield f"Near its budget, the allocator of device {device.device} gives cached memory back."
    kept = len(plan.kv_on_host)
    if kept:
        yield (
            f"Keys and values of {kept} parts lie in RAM: those of the next {plan.kv_slots} are fetched while one "
            "computes."
        )
    if plan.kv_on_disk:
        yield (
            f"RAM holds those of the last {plan.kv_in_ram} tokens; {format_size(plan.kv_on_disk)} of older ones are "
            "written to the offload folder once, and read from there in each step."
        )
    if plan.expert_split is not None:
        yield (
            f"Calls of fewer than {plan.expert_split.below} tokens have the CPU compute some of the experts that are "
            "missing in the cache, while the link fetches the others."
        )


def _slots_on(plan: Plan, device: Key) -> str:
    """Return what takes memory for a moment: slots on an accelerator; on the host, where parts are staged, those they
    go to."""
    streamed = sum(part.runs_on == device for part in plan.streamed)
    count = min(plan.slots, streamed) if streamed else plan.slots
    if not count:
        return "through which keys and values are read from disk"
    return f"{count} slot{'s' * (count > 1)} for streamed parts"


def _time_sentences(plan: Plan) -> Iterator[str]:
    if plan.prediction is None:
        return
    yield f"A step takes {plan.prediction.token:.3g} s, bound by {plan.prediction.binds}."
    for device, seconds in plan.prediction.seconds_saved_per_gib.items():
        yield f"One more GiB on device {device} would take {seconds:.3g} s off a step."


def _speculation(plan: Plan) -> Iterator[str]:
    if plan.speculation is not None:
        yield plan.speculation.describe(plan.batch_size)


def _stages(plan: Plan) -> Iterator[str]:
    if plan.stages is not None:
        yield plan.stages.describe()
    if plan.micro_batch_size is not None:
        yield (
            f"forwards of more than {plan.micro_batch_size} rows are computed in micro-batches of so many, several of "
            "them in the stages at once"
        )


def runs_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield runs of consecutive parts with the same class, devices and reason; streamed parts may take turns on several
    accelerators."""
    run: list[Part] = []
    for part in parts:
        if run and _likeness(part) != _likeness(run[0]):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def label_of(run: Sequence[Part]) -> str:
    """Return the name of a run: "model.layers.0 … 11 (12)"."""
    first = run[0].name or "(the model)"
    if len(run) == 1:
        return first
    last = run[-1].name
    stem = first.rpartition(".")[0]
    if stem and last.startswith(f"{stem}."):
        last = last[len(stem) + 1 :]
    return f"{first} … {last} ({len(run)})"


def _likeness(part: Part) -> tuple[object, ...]:
    streamed = is_accelerator(part.runs_on) and part.runs_on != part.device
    return (
        part.kind,
        part.device,
        None if streamed else part.runs_on,
        part.computed_below,
        part.kv_on_host,
        part.kv_on_disk,
        part.reason,
    )
