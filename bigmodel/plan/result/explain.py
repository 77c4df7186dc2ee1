"""A plan in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from ...devices import format_size
from .plan import Plan
from .tables import label_of, runs_of


def explain(plan: Plan) -> str:
    """Return why each part is where it is, what each device is used for, and what would change it."""
    return "\n".join([*_parts(plan), *_devices(plan), *_time(plan), *plan.notes])


def _parts(plan: Plan) -> Iterator[str]:
    for run in runs_of(plan.parts):
        yield f"{label_of(run)}: {run[0].reason}."


def _devices(plan: Plan) -> Iterator[str]:
    for device in plan.devices.values():
        purposes = {
            "weights": device.weights,
            "buffers": device.buffers,
            "KV cache": device.kv_cache,
            "activations": device.activations,
            "workspace of kernels": device.workspace,
            f"{plan.slots} slots for streamed parts": device.slots,
            "gradients and optimizer state": device.training,
        }
        used = ", ".join(f"{format_size(nbytes)} {name}" for name, nbytes in purposes.items() if nbytes)
        left = "" if device.free is None else f"; {format_size(device.free)} of its budget stay free"
        yield f"Device {device.device} holds {used or 'nothing'}{left}."


def _time(plan: Plan) -> Iterator[str]:
    if plan.prediction is None:
        return
    yield f"A step takes {plan.prediction.token:.3g} s, bound by {plan.prediction.binds}."
    for device, seconds in plan.prediction.seconds_saved_per_gib.items():
        yield f"One more GiB on device {device} would take {seconds:.3g} s off a step."
