"""How the streamed blocks of a placed model reach the devices they run on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..devices import is_accelerator, torch_device
from ..profile import storage_key
from .block import Block
from .build_quantized import carry
from .dispatched import Dispatched
from .fused import lies_on_disk
from .options import Options
from .per_call import PerCall, layers_of
from .pieces import Piece
from .pinned import PinnedBudget
from .placement import Placed
from .quantized_block import QuantizedBlock
from .streamer import Streamer

Named = tuple[str, Block, bool]
"""A module's name, its streamed block, and whether that encloses other blocks."""


class StreamBuilder:
    """Gives the streamed blocks of one model their slots, and its modules their attachments.

    Args:
        modules: The model's modules by name.
        placed: Its tensors by name.
        pieces: What it is cut into.
        options: How it is dispatched.
        pinned: How much host memory may be pinned.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        placed: Mapping[str, Placed],
        pieces: Sequence[Piece],
        options: Options,
        pinned: PinnedBudget,
    ) -> None:
        self._modules = modules
        self._placed = placed
        self._tensors = {piece.name: piece.tensors for piece in pieces}
        self._options = options
        self._pinned = pinned

    def attach(self, blocks: Sequence[Named], result: Dispatched) -> None:
        """Let blocks be streamed to where they run: the main device, or the host where they are cast on the way."""
        by_device: dict[torch.device, list[Named]] = defaultdict(list)
        for name, block, encloses in blocks:
            by_device[self._runs_on(block)].append((name, block, encloses))
        shared = _shared_storages([block for _, block, _ in blocks])
        for device, here in by_device.items():
            sequential = [block for _, block, encloses in here if not encloses]
            errors = carry(sequential, self._placed, self._options.offload_folder, self._pinned)
            result.quantization_errors.update(errors)
            streamer = Streamer(device, sequential, slots=self._options.slots)
            for name, block, encloses in here:
                block.encloses = encloses
                if _packs(block, device, shared):
                    block.pack(pin=self._pinned.take(block.layout.nbytes))
                forward = result.forward_of(name, self._modules[name])
                forward.device = device
                forward.blocks.append((streamer, block))
                forward.per_call = self._per_call(name, block)
            result.streamers.append(streamer)

    def _per_call(self, name: str, block: Block) -> PerCall | None:
        """Return what decides for each call of the module `name` where it is computed; None where it always streams.

        On the host it can be computed if all of it lies there as it is computed with.
        """
        names = self._tensors[name]
        below = self._placed[names[0]].computed_below
        shown = sum(len(tensor.owners) for tensor in block.tensors)
        if not below or block.casts or block.encloses or shown != len(names):
            return None
        return PerCall(below, layers_of(self._modules[name]))

    def _runs_on(self, block: Block) -> torch.device:
        return torch_device(self._placed[block.tensors[0].name].runs_on)


def _shared_storages(blocks: Sequence[Block]) -> set[object]:
    """Return the storages that more than one block refers to."""
    seen: set[object] = set()
    shared: set[object] = set()
    for block in blocks:
        for key in {storage_key(tensor.value) for tensor in block.tensors}:
            (shared if key in seen else seen).add(key)
    return shared


def _packs(block: Block, device: torch.device, shared: set[object]) -> bool:
    """Whether a block's host tensors may be moved into one slab of their own."""
    return (
        is_accelerator(device)
        and not block.casts
        and not isinstance(block, QuantizedBlock)
        and all(
            not lies_on_disk(t.value) and t.value.is_contiguous() and storage_key(t.value) not in shared
            for t in block.tensors
        )
    )
