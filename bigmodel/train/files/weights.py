"""A model's weights in a training checkpoint: one safetensors file, written and read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from bigmodel.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointNotFoundError
from bigmodel.train.files.objects import load_object, numbered, save_object, written_atomically

SAFE_NAME = "model.safetensors"
PICKLED_NAME = "pytorch_model.bin"
EXTRA_NAME = "model_extra.bin"
_TIED = "tied"

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_weights(state: Mapping[str, Any], directory: Path, index: int, *, safe_serialization: bool = True) -> None:
    """Write the state dict of the model number `index`; entries that are not tensors go to a file of their own."""
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
    return dict(load_object(pickled, mmap=True))


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
    """Write tensors to a safetensors file. At most one tensor is copied to the host at a time.

    Names of one and the same tensor (tied weights) are written once; the file's metadata says which.
    """
    kept, tied = _without_ties(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _TIED: json.dumps(tied)}}
    offset = 0
    for name, tensor in kept.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _dtype_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_atomically(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in kept.values():
            dense = tensor.detach().to("cpu").contiguous()
            file.write(memoryview(dense.view(-1).view(torch.uint8).numpy()) if dense.numel() else b"")


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _NAMES:
        raise CheckpointFormatError(
            f"{name} is {tensor.dtype}, which safetensors files cannot hold; use safe_serialization=False"
        )
    return _NAMES[tensor.dtype]


def _without_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # keeps values aligned
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            kept[name] = tensor
            seen[place] = name
    return kept, tied


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of a file, those of tied names included."""
    try:
        with safe_open(path, framework="pt") as file:
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise CheckpointFormatError(f"{path} is not a sound safetensors file: {error}") from error
    tensors.update({name: tensors[first] for name, first in tied.items()})
    return tensors
