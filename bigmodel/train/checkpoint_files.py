"""Files of a training checkpoint: objects in `torch.save`'s format, and weights as safetensors.

A file is renamed to its final name when it is complete. Reading runs no code from the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bigmodel.atomic_files import written_atomically
from bigmodel.checkpoint import Checkpoint, write
from bigmodel.devices.nested import map_tensors
from bigmodel.devices.virtual import VirtualTensor
from bigmodel.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointNotFoundError, TrainError
from bigmodel.sources.headers import read_header

multiarray: Any = import_module("numpy._core.multiarray" if np.__version__ >= "2" else "numpy.core.multiarray")
NUMPY_GLOBALS: list[Any] = [
    multiarray.scalar,
    multiarray._reconstruct,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(name)) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "bool")},
]
"""Classes that files may hold beside tensors, numbers and strings."""


def numbered(name: str, index: int) -> str:
    """Return "optimizer.bin" for 0, "optimizer_1.bin" for 1, and so on."""
    stem, dot, ending = name.partition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{ending}"


def save_object(obj: Any, path: Path) -> None:
    """Write an object of tensors, numbers, strings and containers of them.

    Tensors on a virtual accelerator are written as host tensors, since its tensor class cannot be read back.

    Raises:
        TrainError: it contains objects that cannot be read back without running code.
    """
    obj = map_tensors(lambda tensor: tensor.cpu() if isinstance(tensor, VirtualTensor) else tensor, obj)
    with written_atomically(path) as file:
        torch.save(obj, file)
        file.flush()
        _check_readable(path, Path(file.name))


def _check_readable(path: Path, written: Path) -> None:
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(written)
    allowed = {f"{item.__module__}.{item.__qualname__}" for item in NUMPY_GLOBALS}
    refused = [name for name in refused if name not in allowed]
    if refused:
        raise TrainError(
            f"{path.name} would hold objects of {', '.join(refused)}, which are not read back for safety; "
            "keep tensors, numbers and strings in state_dict, "
            "or allow the class with torch.serialization.add_safe_globals"
        )


def load_object(path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read what `save_object` wrote. No code in the file is run.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointFormatError: the file is damaged, or holds objects that are not allowed.
    """
    if not path.is_file():
        raise CheckpointNotFoundError(f"{path} is not there")
    try:
        with torch.serialization.safe_globals(NUMPY_GLOBALS):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except (
        Exception
    ) as error:  # the reader of a damaged file fails in any way: it looks up what is not there, and so on
        raise CheckpointFormatError(f"{path} cannot be read: {error}") from error


def save_any(obj: Any, path: Path) -> None:
    """Write any object in `torch.save`'s format; it may not be readable by `load_object`."""
    with written_atomically(path) as file:
        torch.save(obj, file)


SAFE_NAME = "model.safetensors"
PICKLED_NAME = "pytorch_model.bin"
EXTRA_NAME = "model_extra.bin"
_TIED = "tied"


def save_weights(state: Mapping[str, Any], directory: Path, index: int, *, safe_serialization: bool = True) -> None:
    """Write the state dict of the model number `index`; entries that are not tensors are written to a separate file."""
    if not safe_serialization:
        save_object(dict(state), directory / numbered(PICKLED_NAME, index))
        return
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in state.items() if name not in tensors}
    write_safetensors(tensors, directory / numbered(SAFE_NAME, index))
    if extra:
        save_object(extra, directory / numbered(EXTRA_NAME, index))


def load_weights(directory: Path, index: int) -> dict[str, Any]:
    """Return the state dict that `save_weights` wrote.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointFormatError: the file is damaged.
    """
    safe = directory / numbered(SAFE_NAME, index)
    if safe.is_file():
        state: dict[str, Any] = read_safetensors(safe)
        extra = directory / numbered(EXTRA_NAME, index)
        if extra.is_file():
            state.update(load_object(extra))
        return state
    pickled = directory / numbered(PICKLED_NAME, index)
    if not pickled.is_file():
        raise CheckpointNotFoundError(f"neither {safe.name} nor {pickled.name} is in {directory}")
    loaded = load_object(pickled, mmap=True)
    if not isinstance(loaded, dict):
        raise CheckpointFormatError(f"{pickled} holds a {type(loaded).__name__} instead of a state dict")
    return loaded


def load_into(model: nn.Module, directory: Path, index: int, *, strict: bool = True) -> None:
    """Read back what `save_weights` wrote, into the model's own tensors.

    Raises:
        CheckpointMismatchError: names or shapes differ from the model's; nothing is changed then.
    """
    state = load_weights(directory, index)
    _check_fits(model, state, directory, strict)
    model.load_state_dict(state, strict=strict)


def _check_fits(model: nn.Module, state: Mapping[str, Any], directory: Path, strict: bool) -> None:
    own = model.state_dict()
    wrong = [
        f"{name}: {tuple(value.shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
        for name, value in state.items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].shape != value.shape
    ]
    if strict:
        wrong += [f"{name}: not in the checkpoint" for name in own if name not in state]
        wrong += [f"{name}: not in the model" for name in state if name not in own]
    if wrong:
        raise CheckpointMismatchError(f"the model does not fit the checkpoint in {directory}: {'; '.join(wrong[:5])}")


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, atomically. At most one tensor is copied to the host at a time.

    Tied weights are written once; the file's metadata maps their other names.
    """
    kept, tied = _without_ties(tensors)
    metadata = {"format": "pt", _TIED: json.dumps(tied)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write.write_safetensors(temporary, [write.Outgoing.of(*item) for item in kept.items()], metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _without_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, _address(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            kept[name] = tensor
            seen[place] = name
    return kept, tied


def _address(tensor: Tensor) -> tuple[int, ...]:
    """Return the addresses of a tensor's elements; for a wrapper subclass, those of its inner tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return (tensor.data_ptr(),)
    names, _ = tensor.__tensor_flatten__()
    return tuple(address for name in names for address in _address(getattr(tensor, name)))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of a file, also under tied names, as views of the mapped file."""
    tied = _tied_names(path)
    checkpoint = Checkpoint.open(path)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint}
    tensors.update({name: tensors[first] for name, first in tied.items() if first in tensors})
    return tensors


def _tied_names(path: Path) -> dict[str, str]:
    """Return the names that `write_safetensors` has omitted, each with the tied name that it has written."""
    text = (read_header(path).metadata or {}).get(_TIED, "{}")
    try:
        tied = json.loads(text)
    except ValueError:
        tied = None
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise CheckpointFormatError(f"the metadata {_TIED!r} of {path} is {text!r:.80}, not a mapping of names")
    return tied
