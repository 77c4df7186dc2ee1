"""Whether there is room for what training keeps beside weights: on an accelerator, and on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..devices import HOST, device_key, format_size, free_memory_bytes, torch_device
from ..errors import DispatchError
from ..profile import storage_key
from .dispatched import Dispatched
from .fused import lies_on_disk
from .placement import Placed

KEPT = 3
"""What training keeps beside a weight, in weights: its gradient, and Adam's two moments."""

SHARE = 0.5
"""How much of an accelerator's free memory that may take; the rest is for activations."""


def has_room_on(device: str, trained: Collection[Placed], placed: Collection[Placed], found: Dispatched) -> bool:
    """Whether an accelerator can hold the gradients and the optimizer's state of what is trained there.

    A plan of training has counted them; without one it is a rule of thumb that decides.
    """
    planned = None if found.plan is None else found.plan.devices.get(device_key(device))
    if planned is not None and planned.training:
        return True
    return KEPT * nbytes_of(each for each in trained if each.device == device) <= SHARE * _room(device, placed, found)


def _room(device: str, placed: Collection[Placed], found: Dispatched) -> int:
    """Return the bytes that are free on `device`, by its counters and by the user's budget."""
    free = free_memory_bytes(device)
    budget = found.options.budget(device)
    if budget is None:
        return free
    slots = sum(
        streamer.slot_bytes for streamer in found.streamers if device_key(streamer.device) == device_key(device)
    )
    return min(free, budget - slots - _resident(placed, device))


def check_host(
    unfit: Collection[Placed], crowded: Collection[Placed], placed: Collection[Placed], found: Dispatched
) -> None:
    """Refuse copies for which the host has no room, their gradients included."""
    needed = 2 * nbytes_of([*unfit, *crowded])
    room = free_memory_bytes(HOST)
    budget = found.options.budget(HOST)
    if budget is not None:
        room = min(room, budget - _resident(placed, HOST))
    if needed <= room:
        return
    first = next(iter((*unfit, *crowded)))
    others = len(unfit) + len(crowded) - 1
    raise DispatchError(
        f"trained parameter lies on {first.device}: {first.name}" + (f" and {others} more" if others else "") + ". "
        f"To be trained they need {format_size(needed)} of host memory, for themselves and their gradients, and "
        f"{format_size(max(room, 0))} are to be had: {format_size(needed - max(room, 0))} more are needed. Train fewer "
        "parameters (adapters, or requires_grad_(False) on the rest), or give the cpu a larger budget"
    )


def nbytes_of(places: Iterable[Placed]) -> int:
    """Return the bytes of tensors, tied ones once."""
    return sum({storage_key(each.tensor): each.tensor.nbytes for each in places}.values())


def _resident(placed: Collection[Placed], device: str) -> int:
    """Return the bytes of the model that lie on `device`; what shows a file lies on disk."""
    wanted = torch_device(device)
    return nbytes_of(each for each in placed if each.tensor.device == wanted and not lies_on_disk(each.tensor))
