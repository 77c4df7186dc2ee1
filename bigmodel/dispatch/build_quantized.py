"""Which streamed blocks cross the link quantised, and where their quantised weights lie."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from ..devices import DISK, format_size
from ..errors import DispatchError
from .block import Block
from .packing import WeightError
from .pinned import PinnedBudget
from .placement import Placed
from .quantized_block import QuantizedBlock, carry_on_disk, packings_of

logger = logging.getLogger(__name__)


def quantized(block: Block, offload_dtype: str | None) -> Block:
    """Return `block` as one that is quantised on its way, or as it is where that is not wanted or wins nothing."""
    if offload_dtype is None:
        return block
    packings = packings_of(block.tensors, offload_dtype)
    return block if not any(packings) else QuantizedBlock(block.name, block.tensors, packings)


def carry(
    blocks: Collection[Block], placed: Mapping[str, Placed], folder: Path | None, pinned: PinnedBudget
) -> dict[str, WeightError]:
    """Quantise what is to be quantised: into host memory, or for blocks that are mapped to disk into a file.

    Args:
        blocks: What is streamed.
        placed: The model's tensors by name.
        folder: Where the file goes.
        pinned: How much host memory may be pinned.

    Returns:
        The error of each quantised weight by its name.

    Raises:
        DispatchError: Something is mapped to disk and there is no folder, or a weight cannot be quantised.
    """
    chosen = [block for block in blocks if isinstance(block, QuantizedBlock)]
    on_disk = [block for block in chosen if any(placed[tensor.name].device == DISK for tensor in block.tensors)]
    if on_disk:
        if folder is None:
            raise DispatchError(
                f"{on_disk[0].name!r} is mapped to 'disk', where its quantised weights lie in no file yet: give "
                "offload_dir= (offload_folder=), a folder to write them to, or leave offload_dtype away"
            )
        carry_on_disk(on_disk, folder)
    for block in chosen:
        if block not in on_disk:
            block.carry_in_memory(pinned.take(block.layout.nbytes))
    errors = {name: error for block in chosen for name, error in block.errors.items()}
    if errors:
        carried, exact = sum(block.carrier.nbytes for block in chosen), sum(block.nbytes for block in chosen)
        logger.info("%s", _account(errors, carried, exact))
    return errors


def _account(errors: Mapping[str, WeightError], carried: int, exact: int) -> str:
    mean = sum(error.relative for error in errors.values()) / len(errors)
    worst = max(errors, key=lambda name: errors[name].relative)
    return (
        f"{len(errors)} weights cross the link quantised: {format_size(carried)} instead of {format_size(exact)}; "
        f"relative error {mean:.2e} in the mean, {errors[worst].relative:.2e} at most ({worst})"
    )
