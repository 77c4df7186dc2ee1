"""Blocks whose weights lie in a safetensors file of a test's own."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from bigmodel.checkpoint import Checkpoint
from bigmodel.dispatch.mapped.mapped_block import MappedBlock, Owner
from bigmodel.dispatch.transfer.files import SourceFiles
from bigmodel.dispatch.weights.block import Block, HostTensor

Registry = dict[str, torch.Tensor]


def checkpoint_file(folder: Path, count: int, elements: int) -> Path:
    """Write a checkpoint of `count` tensors, tensor n holding the number n."""
    path = folder / "model.safetensors"
    save_file({f"{n:03}": torch.full((elements,), float(n)) for n in range(count)}, path)
    return path


def registries(path: Path) -> list[Registry]:
    """Return a module's `_parameters` for each tensor of the file, the tensor viewing it."""
    checkpoint = Checkpoint.open(path)
    return [{"weight": checkpoint.tensor(name)} for name in sorted(checkpoint)]


def streamed_blocks(
    folder: Path, count: int, elements: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Block], list[Registry]]:
    """Return blocks on disk that are to be streamed, and the registries that show them."""
    made = registries(checkpoint_file(folder, count, elements))
    return [
        Block(str(n), [HostTensor(registry["weight"], dtype, [(registry, "weight")])])
        for n, registry in enumerate(made)
    ], made


def mapped_blocks(folder: Path, count: int, elements: int = 2**18) -> tuple[list[MappedBlock], list[Registry]]:
    """Return blocks that are computed with where they lie, and the registries that show them."""
    made = registries(checkpoint_file(folder, count, elements))
    files = SourceFiles()
    return [MappedBlock(str(n), [Owner(registry, "weight")], files) for n, registry in enumerate(made)], made
