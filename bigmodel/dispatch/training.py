"""Prepare a dispatched model for training, by dispatching it again with a minimally changed device map.

The map changes in three cases: trained weights are on disk, in a checkpoint that must not change; trained weights are
on an accelerator without memory for their gradients and optimizer state (`fits_training`, `check_host`); or modules,
such as adapters, were added after the model was dispatched.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

import torch
from torch import nn

from ..devices import DISK, HOST, DeviceLike, device_key, format_size, free_memory_bytes, is_accelerator, torch_device
from ..errors import DispatchError
from ..profile import storage_key
from ..profile.model.tensors import owner_of
from .attach.dispatched import Dispatched, dispatched
from .dispatch import redispatch
from .placement.tensors import DeviceMapLookup, PlacedTensor
from .weights.casts import cast_parts
from .weights.fused_view import lies_on_disk
from .weights.outside_use import OffloadedParameter
from .weights.parameters import like

logger = logging.getLogger(__name__)


def dispatched_parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules in `model` that `dispatch_model` was called with: `model` itself, or modules inside it."""
    return [module for module in model.modules() if dispatched(module) is not None]


def is_streamed(model: nn.Module) -> bool:
    """Whether any weights of `model` are streamed to an accelerator."""
    return any(found.streamers for part in model.modules() if (found := dispatched(part)) is not None)


def prepare_training(model: nn.Module, trained: Iterable[nn.Parameter]) -> bool:
    """Prepare a dispatched model for an optimizer that will change `trained`; return whether anything was moved.

    Trained weights on disk become private copies in host memory; the checkpoint never changes. Trained weights on an
    accelerator move to the host, to be streamed, unless their gradients and optimizer state fit there
    (`fits_training`). Modules added since the model was dispatched are placed by the map. Weights that leave an
    accelerator become new Parameters; all others stay the same Parameters.

    Args:
        model: A dispatched model, or one that wraps it.
        trained: The parameters that will change; those of other models are ignored.

    Raises:
        DispatchError: The copies and their gradients do not fit the host's memory (the message names the missing
            bytes), or the model is quantised on its way to the device.
    """
    chosen = {id(parameter) for parameter in trained}
    moved = [_prepare_part(part, chosen) for part in dispatched_parts(model)]
    return any(moved)


def _prepare_part(part: nn.Module, chosen: Collection[int]) -> bool:
    found = dispatched(part)
    assert found is not None
    if found.quantization_errors:
        raise DispatchError(
            f"the model was dispatched with offload_dtype={found.plan.offload_dtype!r}, which is for inference: "
            "dispatch it again without offload_dtype"
        )
    _refuse_untied_in(part, found, chosen)
    device_map = _with_current_names(part, dict(found.resolved.devices))
    placed = list(DeviceMapLookup(device_map, found.main_device, found.resolved.execution).tensors(part))
    trained = [each for each in placed if id(each.tensor) in chosen]
    added = [each for each in placed if each.name not in found.names]
    on_disk = [each for each in trained if each.storage_device == DISK]
    in_no_file = [e for e in added if e.storage_device == DISK and not e.is_buffer and not lies_on_disk(e.tensor)]
    full = {
        device
        for device in {each.storage_device for each in trained if is_accelerator(each.storage_device)}
        if not fits_training(device, trained, placed, found)
    }
    evicted = [each for each in trained if each.storage_device in full]
    _refuse_cast(part, [each for each in trained if each in evicted or not is_accelerator(each.storage_device)])
    if not (added or on_disk or evicted):
        return False
    check_host(on_disk, evicted, placed, found)
    _copy_to_memory(on_disk)
    _move_in_map(device_map, placed, {each.name for each in (*on_disk, *in_no_file, *evicted)})
    if on_disk or evicted:
        logger.info("%s", _summary(on_disk, evicted))
    redispatch(part, device_map)
    return True


def refuse_untied(model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Raise DispatchError if any of `trained` was tied and lies on two devices now, so that its places would be trained
    apart."""
    chosen = {id(parameter) for parameter in trained}
    for part in dispatched_parts(model):
        found = dispatched(part)
        assert found is not None
        _refuse_untied_in(part, found, chosen)


def _refuse_untied_in(part: nn.Module, found: Dispatched, chosen: Collection[int]) -> None:
    tensors = dict(part.named_parameters(remove_duplicate=False))
    for name, first in found.ties.items():
        one, other = tensors.get(first), tensors.get(name)
        if one is None or other is None or not {id(one), id(other)} & set(chosen):
            continue
        if one is not other and storage_key(one) != storage_key(other):
            raise DispatchError(
                f"{first} and {name} were one tied weight, but the device map has them on {one.device} and "
                f"{other.device}, where they would be trained apart: map both to one device, or call "
                "requires_grad_(False) on them"
            )


def _refuse_cast(part: nn.Module, trained: Collection[PlacedTensor]) -> None:
    """Raise DispatchError if any of `trained`, which are on the host or on disk, would be streamed and cast in a
    forward."""
    streamed = {id(each.tensor): each.name for each in trained if is_accelerator(each.execution_device)}
    for cast in cast_parts(part):
        for tensor in cast.module.parameters():
            if id(tensor) in streamed and cast.changes(tensor):
                raise DispatchError(
                    f"{streamed[id(tensor)]} cannot be trained while it is streamed: the forward of "
                    f"{cast.by or type(part).__name__!r} casts it to {str(cast.dtype).removeprefix('torch.')}. Cast "
                    "it before the model is dispatched, map it to an accelerator, or call requires_grad_(False) on it"
                )


def _move_in_map(device_map: dict[str, DeviceLike], placed: Collection[PlacedTensor], moving: Collection[str]) -> None:
    """Map the tensors `moving` to the host: whole entries of the map if all their parameters move, else by name."""
    owners = {each.name: owner_of(each.name, device_map) for each in placed if not each.is_buffer}
    staying = {owner for name, owner in owners.items() if name not in moving}
    for name in moving:
        owner = owners[name]
        device_map[name if owner is None or owner in staying else owner] = HOST


def _with_current_names(part: nn.Module, device_map: dict[str, DeviceLike]) -> dict[str, DeviceLike]:
    """Return the map with current names: peft wraps each module that it adapts, which becomes its `base_layer`."""
    names = {name for name, _ in part.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in (*part.named_parameters(remove_duplicate=False), *part.named_buffers())}
    renamed = {}
    for name, device in device_map.items():
        owner, _, key = name.rpartition(".")
        wrapped = f"{owner}.base_layer.{key}"
        renamed[wrapped if name not in names and wrapped in names else name] = device
    return renamed


def _copy_to_memory(places: Collection[PlacedTensor]) -> None:
    """Copy weights on disk into host memory; parameters stay the same objects."""
    copies: dict[object, torch.Tensor] = {}
    for each in places:
        key = storage_key(each.tensor)
        if key not in copies:
            copies[key] = each.tensor.detach().clone()
        if type(each.tensor) in (nn.Parameter, OffloadedParameter):
            each.tensor.data = copies[key]
        else:
            each.registry[each.key] = like(each.tensor, copies[key])


def _summary(on_disk: Collection[PlacedTensor], evicted: Collection[PlacedTensor]) -> str:
    parts = []
    if on_disk:
        parts.append(f"{format_size(nbytes_of(on_disk))} of trained weights were copied from disk to host memory")
    if evicted:
        parts.append(
            f"{format_size(nbytes_of(evicted))} of trained weights moved to the host: their gradients and optimizer "
            "state would not fit on the accelerator"
        )
    return "; ".join(parts)


TRAINING_COPIES = 3
"""Tensors of a weight's size that training adds: its gradient, and Adam's two moments."""

TRAINING_SHARE = 0.5
"""Share of an accelerator's free memory for gradients and optimizer state; the rest is for activations."""


def fits_training(
    device: str, trained: Collection[PlacedTensor], placed: Collection[PlacedTensor], found: Dispatched
) -> bool:
    """Whether an accelerator has memory for the gradients and optimizer state of the parameters trained there.

    A training plan has counted them. Without one, `TRAINING_COPIES` times their bytes must fit into `TRAINING_SHARE` of
    the free memory.
    """
    planned = found.plan.devices.get(device_key(device))
    if planned is not None and planned.training:
        return True
    here = nbytes_of(each for each in trained if each.storage_device == device)
    return TRAINING_COPIES * here <= TRAINING_SHARE * _available_bytes(device, placed, found)


def _available_bytes(device: str, placed: Collection[PlacedTensor], found: Dispatched) -> int:
    """Return the bytes that are free on `device`, by its counters and by the user's budget."""
    free = free_memory_bytes(device)
    budget = _budget(device, found)
    if budget is None:
        return free
    slots = sum(
        streamer.slot_bytes for streamer in found.streamers if device_key(streamer.device) == device_key(device)
    )
    return min(free, budget - slots - _resident(placed, device))


def _budget(device: str, found: Dispatched) -> int | None:
    planned = found.plan.devices.get(device_key(device))
    return None if planned is None else planned.budget


def check_host(
    on_disk: Collection[PlacedTensor],
    evicted: Collection[PlacedTensor],
    placed: Collection[PlacedTensor],
    found: Dispatched,
) -> None:
    """Raise DispatchError if copies of the tensors `on_disk` and `evicted` and their gradients do not fit the host."""
    needed = 2 * nbytes_of([*on_disk, *evicted])
    available = free_memory_bytes(HOST)
    budget = _budget(HOST, found)
    if budget is not None:
        available = min(available, budget - _resident(placed, HOST))
    if needed <= available:
        return
    available = max(available, 0)
    first = next(iter((*on_disk, *evicted)))
    others = len(on_disk) + len(evicted) - 1
    raise DispatchError(
        f"trained parameter lies on {first.storage_device}: {first.name}"
        + (f" and {others} more" if others else "")
        + ". "
        f"Training needs {format_size(needed)} of host memory for copies and gradients, and {format_size(available)} "
        f"are available: {format_size(needed - available)} more are needed. Train fewer parameters (adapters, or "
        "requires_grad_(False) on the rest), or give the cpu a larger budget"
    )


def nbytes_of(places: Iterable[PlacedTensor]) -> int:
    """Return the bytes of tensors, tied ones once."""
    return sum({storage_key(each.tensor): each.tensor.nbytes for each in places}.values())


def _resident(placed: Collection[PlacedTensor], device: str) -> int:
    """Return the bytes of the model's tensors on `device`; views of a mapped file count as disk."""
    wanted = torch_device(device)
    return nbytes_of(each for each in placed if each.tensor.device == wanted and not lies_on_disk(each.tensor))
