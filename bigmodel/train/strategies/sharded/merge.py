"""Merges the weights of a sharded training checkpoint, one output file at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from bigmodel.atomic_files import sync_folder, written_atomically
from bigmodel.devices import format_size, parse_size
from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.limits import SHARD_SIZE
from bigmodel.train.checkpoint_files import save_object, write_safetensors
from bigmodel.train.strategies.sharded.distributed_files import read_index, read_tensors

_SHARDS = "pytorch_model_fsdp_0"


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    max_shard_size: int | str = SHARD_SIZE,
) -> Path:
    """Write the weights of a sharded checkpoint of bigmodel or accelerate as ordinary files.

    At most one output file is in memory. Files are renamed to their final names when complete, the index last.

    Args:
        checkpoint_dir: the folder of shards, or the `save_state` folder that has it.
        output_path: the folder to write to; `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index.
        safe_serialization: False writes `pytorch_model*.bin`.
        remove_checkpoint_dir: delete the folder of shards when all is written.
        max_shard_size: bytes, or "5GB": the largest file written; a single larger tensor gets a file of its own.

    Returns:
        The folder written to.

    Raises:
        CheckpointNotFoundError: there are no shards.
        CheckpointFormatError: the shards' index is damaged.
    """
    source = _shard_folder(Path(checkpoint_dir))
    target = Path(output_path)
    index = read_index(source)
    sizes = _tensor_sizes(index)
    if not sizes:
        raise CheckpointError(f"{source} holds no tensors")
    groups = list(_groups(sizes, parse_size(max_shard_size)))
    target.mkdir(parents=True, exist_ok=True)
    prefix = _common_prefix(sizes)
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(groups, start=1):
        name = f"{stem}.{ending}" if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.{ending}"
        tensors = _flat(read_tensors(source, set(keys)))
        named = {key.removeprefix(prefix): tensors[key] for key in keys}
        _write(named, target / name, safe_serialization)
        weight_map.update(dict.fromkeys(named, name))
    if len(groups) > 1:
        _write_index(weight_map, sum(sizes.values()), target / f"{stem}.{ending}.index.json")
    sync_folder(target)
    if remove_checkpoint_dir:
        shutil.rmtree(source)
    return target


def _shard_folder(folder: Path) -> Path:
    for candidate in (folder, folder / _SHARDS):
        if (candidate / ".metadata").is_file():
            return candidate
    raise CheckpointNotFoundError(
        f"{folder} has no sharded weights: neither it nor {_SHARDS} in it holds a .metadata file"
    )


def _tensor_sizes(index: Metadata) -> dict[str, int]:
    """Return the bytes of each tensor, by its name in the checkpoint."""
    return {
        name: entry.size.numel() * entry.properties.dtype.itemsize
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _groups(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    """Yield groups of names, in order, of at most `limit` bytes each."""
    group: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if group and filled + size > limit:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    yield group


def _common_prefix(names: dict[str, int]) -> str:
    """Return the prefix "model." under which `save_state` stores weights; a model's own such prefix is kept."""
    return "model." if all(name.startswith("model.") for name in names) else ""


def _flat(state: dict[str, object], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            found[prefix + name] = value
        elif isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{name}."))
    return found


def _write(tensors: dict[str, Tensor], path: Path, safe_serialization: bool) -> None:
    if safe_serialization:
        write_safetensors(tensors, path)
    else:
        save_object({name: torch.Tensor.contiguous(value) for name, value in tensors.items()}, path)


def _write_index(weight_map: dict[str, str], total: int, path: Path) -> None:
    content = {"metadata": {"total_size": total, "size": format_size(total)}, "weight_map": weight_map}
    with written_atomically(path) as file:
        file.write(json.dumps(content, indent=2, sort_keys=True).encode())
