"""Attach the streamed blocks of a model: streamers, slots, pinned memory, and weights quantised for the link."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ...devices import DISK, format_size, is_accelerator, torch_device
from ...errors import DispatchError
from ...plan import Plan
from ...profile import storage_key
from ...profile.model.units import layer_indices
from ..placement.dispatch_units import DispatchUnit
from ..placement.tensors import PlacedTensor
from ..streaming.streamer import Streamer
from ..weights.block import Block, Registry
from ..weights.data_use import uses_data
from ..weights.fused_view import lies_on_disk
from ..weights.packing import WeightError
from ..weights.quantized_block import QuantizedBlock, carry_on_disk, packings_of
from .dispatched import Dispatched
from .host_or_device import HostOrDevice
from .pinned_memory import PinnedBudget

Named = tuple[str, Block, bool]
"""A module's name, its streamed block, and whether the block encloses other blocks."""


class StreamBuilder:
    """Creates the streamers and slots of one model's streamed blocks, and attaches its modules to them.

    Args:
        modules: The model's modules by name.
        placed: Its tensors by name.
        units: Its dispatch units.
        plan: Gives slots, readers, and the bytes of staging and of gradients.
        pinned: Budget of pinned host memory.
        folder: Folder for quantised weights that are mapped to disk.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        placed: Mapping[str, PlacedTensor],
        units: Sequence[DispatchUnit],
        plan: Plan,
        pinned: PinnedBudget,
        folder: Path | None,
    ) -> None:
        self._modules = modules
        self._placed = placed
        self._tensors = {unit.name: unit.tensors for unit in units}
        self._plan = plan
        self._pinned = pinned
        self._folder = folder

    def attach(self, blocks: Sequence[Named], result: Dispatched) -> None:
        """Attach blocks to streamers for their execution device: an accelerator, or the host if they are only cast."""
        by_device: dict[torch.device, list[Named]] = defaultdict(list)
        for name, block, encloses in blocks:
            by_device[self._execution_device(block)].append((name, block, encloses))
        shared = _shared_storages([block for _, block, _ in blocks])
        for device, here in by_device.items():
            sequential = [block for _, block, encloses in here if not encloses]
            errors = quantize_blocks(sequential, self._placed, self._folder, self._pinned)
            result.quantization_errors.update(errors)
            plan = self._plan
            streamer = Streamer(device, sequential, plan.slots, plan.staging_bytes, plan.readers, plan.gradient_bytes)
            for name, block, encloses in here:
                block.encloses = encloses
                block.resident = _resident(self._modules[name], block, device)
                block.module = weakref.ref(self._modules[name])
                block.uses_data = uses_data(self._modules[name])
                if _packs(block, device, shared):
                    block.pack(pin=self._pinned.take(block.layout.nbytes))
                forward = result.forward_of(name, self._modules[name])
                forward.device = device
                forward.blocks.append((streamer, block))
                forward.host_or_device = self._host_or_device(name, block)
            result.streamers.append(streamer)

    def _host_or_device(self, name: str, block: Block) -> HostOrDevice | None:
        """Return the per-call choice between host and device for the module `name`; None if it is always streamed.

        The host can compute a module whose tensors all lie there in the dtype of the computation.
        """
        names = self._tensors[name]
        below = self._placed[names[0]].computed_below
        streamed = sum(len(tensor.owners) for tensor in block.tensors)
        if not below or block.casts or block.encloses or streamed != len(names):
            return None
        return HostOrDevice(below, layer_indices(self._modules[name]))

    def _execution_device(self, block: Block) -> torch.device:
        return torch_device(self._placed[block.tensors[0].name].execution_device)


def _resident(module: nn.Module, block: Block, device: torch.device) -> list[tuple[Registry, str]]:
    """Return where parts of `module` have parameters on `device` that are not streamed in `block`."""
    streamed = {id(tensor.value) for tensor in block.tensors}
    return [
        (part._parameters, key)
        for part in module.modules()
        for key, parameter in part._parameters.items()
        if parameter is not None and id(parameter) not in streamed and parameter.device == device
    ]


def _shared_storages(blocks: Sequence[Block]) -> set[object]:
    """Return the storages that more than one block refers to."""
    seen: set[object] = set()
    shared: set[object] = set()
    for block in blocks:
        for key in {storage_key(tensor.value) for tensor in block.tensors}:
            (shared if key in seen else seen).add(key)
    return shared


def _packs(block: Block, device: torch.device, shared: set[object]) -> bool:
    """Whether a block's host tensors may be moved into one packed buffer."""
    return (
        is_accelerator(device)
        and not block.casts
        and not isinstance(block, QuantizedBlock)
        and all(
            not lies_on_disk(t.value) and t.value.is_contiguous() and storage_key(t.value) not in shared
            for t in block.tensors
        )
    )


logger = logging.getLogger(__name__)


def quantized(block: Block, offload_dtype: str | None) -> Block:
    """Return `block` quantised for the link; unchanged if `offload_dtype` is None or no tensor becomes smaller."""
    if offload_dtype is None:
        return block
    packings = packings_of(block.tensors, offload_dtype)
    return block if not any(packings) else QuantizedBlock(block.name, block.tensors, packings)


def quantize_blocks(
    blocks: Collection[Block], placed: Mapping[str, PlacedTensor], folder: Path | None, pinned: PinnedBudget
) -> dict[str, WeightError]:
    """Quantise the quantised blocks among `blocks`: into host memory, or into a file for blocks mapped to disk.

    Args:
        blocks: The streamed blocks.
        placed: The model's tensors by name.
        folder: Folder for that file.
        pinned: Budget of pinned host memory.

    Returns:
        The error of each quantised weight by its name.

    Raises:
        DispatchError: A block is mapped to disk and `folder` is None, or a weight cannot be quantised.
    """
    chosen = [block for block in blocks if isinstance(block, QuantizedBlock)]
    on_disk = [block for block in chosen if any(placed[tensor.name].storage_device == DISK for tensor in block.tensors)]
    if on_disk:
        if folder is None:
            raise DispatchError(
                f"{on_disk[0].name!r} is mapped to 'disk', but its quantised weights are in no file yet: give "
                "offload_dir= (offload_folder=), a folder to write them to, or leave out offload_dtype"
            )
        carry_on_disk(on_disk, folder)
    for block in chosen:
        if block not in on_disk:
            block.carry_in_memory(pinned.take(block.layout.nbytes))
    errors = {name: error for block in chosen for name, error in block.errors.items()}
    if errors:
        carried, exact = sum(block.carrier.nbytes for block in chosen), sum(block.nbytes for block in chosen)
        logger.info("%s", _summary(errors, carried, exact))
    return errors


def _summary(errors: Mapping[str, WeightError], carried: int, exact: int) -> str:
    mean = sum(error.relative for error in errors.values()) / len(errors)
    worst = max(errors, key=lambda name: errors[name].relative)
    return (
        f"{len(errors)} weights cross the link quantised: {format_size(carried)} instead of {format_size(exact)}; "
        f"relative error {mean:.2e} in the mean, {errors[worst].relative:.2e} at most ({worst})"
    )
