"""Saves a model as a sharded checkpoint. After a crash the folder holds either the old or the new checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..devices import parse_size
from ..errors import CheckpointError
from ..profile import storage_key
from ..quantized.stored import published
from ..sources.conversion import is_transformers_model
from .model_tensors import find_model_tensors
from .progress import byte_progress
from .replace import Replacement
from .write import Outgoing, write_safetensors


def save_model(
    model: nn.Module | Mapping[str, torch.Tensor],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "1GB",
    safe_serialization: bool = True,
    *,
    config_of: nn.Module | None = None,
) -> None:
    """Write the parameters and persistent buffers of a model to a folder, and the config of a transformers model.

    The model may be dispatched, and its parameters may be views of the files that are replaced. A tied tensor is
    stored once, under its first name. At most one tensor is in memory in addition to the model (without
    `safe_serialization`, one shard).

    An existing checkpoint in the folder is replaced atomically by a last rename: the folder loads as the old one
    before, as the new one after it. New shards therefore get unused names. Shards of the old checkpoint are removed
    last; other files stay.

    Args:
        model: a module, or a state dict.
        save_directory: the folder; created if it does not exist.
        max_shard_size: maximum bytes of a file, as a number or text such as ``"5GB"``. A larger tensor gets a file of
            its own. A model that fits in one file is written to one.
        safe_serialization: write safetensors; otherwise ``.bin`` files with ``torch.save``.
        config_of: the module of a given state dict; its config is written, if it has one.

    Raises:
        CheckpointError: a tensor has no value (is on meta), or a dtype that safetensors cannot hold; `save_directory`
            is a file.
        SizeError: `max_shard_size` is no size.
    """
    tensors = _module_tensors(model) if isinstance(model, nn.Module) else _distinct(model)
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise CheckpointError(
            f"{meta[0]} and {len(meta) - 1} others have no value (they are on meta); load or initialise them first"
        )
    folder = Path(save_directory)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; name a folder to save to")
    folder.mkdir(parents=True, exist_ok=True)
    shards = split_shards(tensors, parse_size(max_shard_size))
    with Replacement(folder, safe_serialization) as new, byte_progress("Saving", _nbytes(tensors)) as advance:
        names = new.shard_names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            if safe_serialization:
                outgoing = [Outgoing.of(key, tensor) for key, tensor in shard.items()]
                write_safetensors(new.path(name), outgoing, {"format": "pt"}, advance)
            else:
                _write_legacy(new.path(name), shard)
                advance(_nbytes(shard))
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": _nbytes(tensors)},
                "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
            }
            new.write_index(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
        described = model if isinstance(model, nn.Module) else config_of
        if described is not None and is_transformers_model(described):
            for name, content in _configs(described).items():
                new.write_beside(name, content)
        new.commit()


def split_shards(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Split tensors into consecutive groups of at most `max_bytes`, or of one larger tensor; at least one group.

    Raises:
        CheckpointError: `max_bytes` is not positive.
    """
    if max_bytes <= 0:
        raise CheckpointError(f"max_shard_size is {max_bytes} bytes; it must be positive")
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _module_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer once; a tied one under the name that loading ties the others to, and
    what a quantised checkpoint stores under the keys that it has there."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ()) if is_transformers_model(model) else set()
    stored = published(model)
    tensors = {}
    for target in find_model_tensors(model):
        if target.persistent:
            name = next((name for name in target.names if name not in tied), target.name)
            if stored is not None and name in stored and not target.tensor.is_meta:
                tensors.update(stored.tensors(name, target.tensor.detach()))
            else:
                tensors[name] = target.tensor.detach()
    return tensors


def _distinct(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, each once, under its first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{name} is a {type(tensor).__name__}, not a tensor; leave it out of the state dict")
        memory = (storage_key(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if memory not in seen:
            tensors[name] = tensor.detach()
            seen.add(memory)
    return tensors


def _write_legacy(path: Path, shard: dict[str, torch.Tensor]) -> None:
    # Cloned: torch.save writes the whole storage behind a view.
    copied = {name: tensor.cpu().contiguous().clone() for name, tensor in shard.items()}
    with path.open("xb") as file:
        torch.save(copied, file)
        file.flush()
        os.fsync(file.fileno())


def _configs(model: Any) -> dict[str, bytes]:
    """Return the config files of a transformers model by name, as its own ``save_pretrained`` writes them."""
    config = deepcopy(model.config)
    config.architectures = [_architecture(model)]
    config.dtype = model.dtype
    files = {"config.json": config.to_json_string().encode()}
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    return files


def _architecture(model: nn.Module) -> str:
    """Return the name of the model's class. PyTorch's `fully_shard` replaces it by a subclass, which is skipped."""
    return next(c.__name__ for c in type(model).__mro__ if not c.__module__.startswith("torch.distributed"))


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
