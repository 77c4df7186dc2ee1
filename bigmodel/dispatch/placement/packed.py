"""Weights that the host computes packed: which layers a plan has packed, and what becomes of their stored tensors.

A stored tensor stays what it is, a parameter under its published name. Where it views a file, its pages are released
once its weight is packed: they are no memory of this process until somebody reads the tensor, to save it, say. A tensor
that is in memory without a file stays beside the packed weight, and the plan counts both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from ...checkpoint import is_untouched, release
from ...checkpoint.mapping import is_mapped
from ...devices import HOST, format_size
from ...devices.memory import free_memory_bytes
from ...errors import BudgetError
from ...plan import Plan
from ...plan.result.plan import DevicePlan
from ...quantized.host_kernels import PACKED, HostKernel, PackedWeight
from ...quantized.linear import QuantizedLinear
from ...quantized.packable import packable
from .resolve import ResolvedMap
from .tensors import PlacedTensor


def packed_layers(
    model: nn.Module, placed: Mapping[str, PlacedTensor], plan: Plan
) -> Iterator[tuple[str, QuantizedLinear, HostKernel]]:
    """Yield the layers whose weights are to be packed, each with its name and kernel: those that a kernel of the host
    takes, that RAM holds, and that the host computes in every call."""
    if plan.host_kernels != PACKED:
        return
    for name, (layer, kernel) in packable(model).items():
        found = [placed[f"{name}.{own}"] for own in layer.stored]
        if all(each.storage_device == each.execution_device == HOST and not each.computed_below for each in found):
            yield name, layer, kernel


def pack(layer: QuantizedLinear) -> PackedWeight:
    """Pack the weight of a layer, and release the pages of stored tensors that are not read any more."""
    found = layer.pack()
    for stored in found.displaced:
        if is_mapped(stored) and is_untouched(stored):
            release(stored)
    return found


def with_unmapped_tensors(model: nn.Module, resolved: ResolvedMap) -> ResolvedMap:
    """Return the map with those stored tensors in its plan that stay in memory beside their packed weights.

    Raises:
        BudgetError: RAM has no room for both; the message says how much is missing.
    """
    placed = {each.name: each for each in resolved.placement.tensors(model)}
    found = [
        placed[f"{name}.{own}"].tensor
        for name, layer, kernel in packed_layers(model, placed, resolved.plan)
        for own, leaf in layer.stored.items()
        if leaf in kernel.copied and not is_mapped(placed[f"{name}.{own}"].tensor)
    ]
    if not found:
        return resolved
    nbytes = sum(stored.nbytes for stored in found)
    host = resolved.plan.devices.get(HOST, DevicePlan(HOST, None))
    free = free_memory_bytes(HOST) - host.total if host.free is None else host.free
    if free < nbytes:
        raise BudgetError(
            f"host_kernels='packed' keeps stored weights of no file ({format_size(nbytes)}) beside packed ones, and "
            f"RAM lacks {format_size(nbytes - free)} for that: load the model from its checkpoint, or leave it out"
        )
    devices = {**resolved.plan.devices, HOST: replace(host, weights=host.weights + nbytes)}
    note = f"{len(found)} stored tensors ({format_size(nbytes)}) are in memory beside packed ones, as no file has them"
    return replace(resolved, plan=replace(resolved.plan, devices=devices, notes=(*resolved.plan.notes, note)))
