"""Tensors that belong on disk but lie in no file as they are: written once, to a file that vanishes with them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .mapping import MappedFile
from .write import Outgoing, write_safetensors


def offload(
    folder: Path, tensors: Iterable[Outgoing], advance: Callable[[int], None] | None = None
) -> dict[str, torch.Tensor]:
    """Write `tensors` to a file in `folder` and return them as views of it, by name.

    The file has no name any more when this returns, so no later model can take it for its own and nothing has to be
    cleaned up: its space is free again when the last tensor is gone, also after a crash.

    Args:
        folder: on which file system; made if need be.
        tensors: read one after another.
        advance: called with the bytes written, tensor by tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"offload-{uuid.uuid4().hex}.safetensors"
    outgoing = list(tensors)
    try:
        offsets = write_safetensors(path, outgoing, advance=advance)
        file = MappedFile(path)
    finally:
        if path.exists():
            os.unlink(path)
    return {tensor.name: file.tensor(tensor.dtype, tensor.shape, offsets[tensor.name]) for tensor in outgoing}
