"""Weights that the host computes with lie at addresses that torch would choose for them.

Files of others begin tensors anywhere. At addresses that are no multiple of `VECTOR_BYTES` kernels of the host take
other code paths, and outputs would differ in their last bits from those of the same model in memory. Such weights are
copied once: those mapped to RAM always, for a copy takes what the mapped pages took, and those mapped to disk as far as
RAM has room for them beside the rest of the plan. Weights that are streamed, looked up by rows or restored are aligned
where they are computed with. Models that transformers loads are left alone: it maps files as they are, so that its own
models compute with misaligned weights, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ...checkpoint import release
from ...checkpoint.mapping import is_misaligned
from ...devices import DISK, HOST, format_size
from ...devices.memory import free_memory_bytes
from ...limits import VECTOR_BYTES
from ...plan.result.plan import DevicePlan
from ...profile import storage_key
from ...profile.model.units import is_lookup
from ...quantized.stored import stored_names
from ..weights.outside_use import host_value
from .resolve import ResolvedMap
from .tensors import PlacedTensor

logger = logging.getLogger(__name__)


def misaligned(model: nn.Module, placed: Iterable[PlacedTensor]) -> list[PlacedTensor]:
    """Return those of `placed` that the host computes with where a file has them misaligned."""
    stored = stored_names(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    return [
        each
        for each in placed
        if each.offloaded
        and (each.execution_device == HOST or each.computed_below)
        and each.tensor.is_floating_point()
        and each.name not in stored
        and not is_lookup(modules[each.name.rpartition(".")[0]])
        and is_misaligned(each.tensor)
    ]


def with_aligned_copies(model: nn.Module, resolved: ResolvedMap) -> ResolvedMap:
    """Return the map with the weights on disk that are copied to be aligned, which its plan counts; one line says which
    are not, as RAM has no room for them."""
    found = [each for each in misaligned(model, resolved.placement.tensors(model)) if each.storage_device == DISK]
    if not found:
        return resolved
    host = resolved.plan.devices.get(HOST, DevicePlan(HOST, None))
    free = free_memory_bytes(HOST) - host.total if host.free is None else host.free
    copied: dict[object, int] = {}
    for each in found:
        if free >= each.tensor.nbytes or storage_key(each.tensor) in copied:
            free -= 0 if storage_key(each.tensor) in copied else each.tensor.nbytes
            copied[storage_key(each.tensor)] = each.tensor.nbytes
    left = [each for each in found if storage_key(each.tensor) not in copied]
    if left:
        logger.warning("%s", _left_there(left))
    names = frozenset(each.name for each in found if storage_key(each.tensor) in copied)
    nbytes = sum(copied.values())
    devices = {**resolved.plan.devices, HOST: replace(host, weights=host.weights + nbytes)}
    notes = (*resolved.plan.notes, *([_copied(len(copied), nbytes)] if copied else []))
    return replace(resolved, plan=replace(resolved.plan, devices=devices, notes=notes), aligned=names)


def put_back(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Have a tensor that has a copy view its file again; what was written to it is then private to the map."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if torch.equal(host_value(tensor).view(torch.uint8), view.view(torch.uint8)):
            release(view)
        else:
            view.copy_(tensor)
        tensor.data = view


def _copied(count: int, nbytes: int) -> str:
    return f"{count} weights on disk ({format_size(nbytes)}) have a copy in RAM, since their file does not align them"


def _left_there(left: Sequence[PlacedTensor]) -> str:
    nbytes = sum({storage_key(each.tensor): each.tensor.nbytes for each in left}.values())
    return (
        f"{left[0].name} and {len(left) - 1} other weights on disk do not begin at multiples of {VECTOR_BYTES} bytes "
        f"in their file, and RAM has no room for aligned copies ({format_size(nbytes)}): outputs may differ in their "
        "last bits from those of the model in memory"
    )
