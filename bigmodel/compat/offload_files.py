"""Accelerate's folder of offloaded weights: raw bytes, one ``NAME.dat`` per tensor, and their shapes in ``index.json``.

Nothing here is needed to offload: a checkpoint is used where it lies. Other libraries write such folders and read them.
Tensors that are read from one are views of the mapped files. What reads files is imported when one is read: libraries
import this module as they start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..atomic_files import write_text, written_atomically
from ..devices import HOST, DeviceLike, torch_device
from ..dispatch.weights.parameters import like
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

INDEX = "index.json"

Folder = str | os.PathLike[str]
Entry = Mapping[str, Any]
"""An index's entry for a tensor: ``dtype`` and ``shape`` of a ``.dat`` file, or ``safetensors_file``, ``weight_name``
and perhaps the ``dtype`` that it is cast to."""

Value = TypeVar("Value")


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Folder, index: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Write a tensor to ``offload_folder/weight_name.dat``, add it to `index` and return that."""
    value = weight.detach().to(HOST).contiguous()
    with written_atomically(Path(offload_folder) / f"{weight_name}.dat") as file:
        file.write(value.reshape(-1).view(torch.uint8).numpy().data)
    if index is not None:
        index[weight_name] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: Entry) -> torch.Tensor:
    """Return the tensor of a ``.dat`` file, as a view of the mapped file.

    Args:
        weight_info: Its ``dtype`` and ``shape``.

    Raises:
        CheckpointError: The file does not hold so many bytes.
    """
    path, shape = Path(weight_file), tuple(weight_info["shape"])
    dtype = _dtype(weight_info["dtype"])
    needed = torch.Size(shape).numel() * dtype.itemsize
    present = path.stat().st_size
    if present != needed:
        raise CheckpointError(
            f"{path} has {present} bytes, but {dtype} of shape {shape} takes {needed}: it was written for another model"
        )
    if needed == 0:
        return torch.empty(shape, dtype=dtype)
    from ..checkpoint.mapping import MappedFile

    return MappedFile(path).tensor(dtype, shape, 0)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: Folder) -> None:
    """Add `index` to the folder's ``index.json``; do nothing if there is nothing to add."""
    if not index:
        return
    path = Path(offload_folder) / INDEX
    present = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_text(path, json.dumps({**present, **index}, indent=2))


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a state dict to a folder, with their index."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


class PrefixedDataset(Mapping[str, Value]):
    """The part of a mapping whose keys begin with `prefix`, under keys without it.

    Args:
        dataset: The whole mapping.
        prefix: The beginning of the keys, with its dot.
    """

    def __init__(self, dataset: Mapping[str, Value], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Value:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name, from a state dict or from files; tensors of files are views of the mapped files.

    Args:
        state_dict: Tensors; they take precedence.
        save_folder: A folder of `offload_state_dict`.
        index: What is in the files, by name; None reads it from the folder.
        device: Where tensors of safetensors files are copied to; None leaves them where they lie.

    Raises:
        ValueError: Nothing is given.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Entry] | None = None,
        device: DeviceLike | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("give a state_dict, a save_folder or an index: there are no weights to load otherwise")
        if index is None and save_folder is not None:
            index = json.loads((Path(save_folder) / INDEX).read_text(encoding="utf-8"))
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.index: Mapping[str, Entry] = {} if index is None else index
        self.save_folder = save_folder
        self.device = device
        self.all_keys = list(dict.fromkeys((*self.state_dict, *self.index)))
        self._opened: dict[str, Checkpoint] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if entry.get("safetensors_file") is None:
            assert self.save_folder is not None, f"{key} is in a .dat file, and no folder is given"
            return load_offloaded_weight(Path(self.save_folder) / f"{key}.dat", entry)
        value = stored_tensor(key, entry, self._opened)
        value = value.to(wanted_dtype(entry, value))
        return value if self.device is None else value.to(torch_device(self.device))

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def stored_tensor(name: str, entry: Entry, opened: dict[str, Checkpoint]) -> torch.Tensor:
    """Return the tensor of a safetensors file: a view of the mapped file, in the file's dtype.

    Args:
        opened: Files opened so far; extended.
    """
    from ..checkpoint import Checkpoint

    path = str(entry["safetensors_file"])
    if path not in opened:
        opened[path] = Checkpoint.open(path)
    return opened[path].tensor(entry.get("weight_name", name))


def wanted_dtype(entry: Entry, value: torch.Tensor) -> torch.dtype:
    """Return the dtype that an entry says, or that of its value."""
    return _dtype(entry["dtype"]) if "dtype" in entry else value.dtype


def extract_submodules_state_dict(state_dict: Mapping[str, Value], submodule_names: Iterable[str]) -> dict[str, Value]:
    """Return the part of a state dict that belongs to the modules (or is one of the tensors) named."""
    return {
        key: value
        for name in submodule_names
        for key, value in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }


def load_offloaded_weights(model: torch.nn.Module, index: Mapping[str, Entry] | None, offload_folder: Folder) -> None:
    """Give `model` the weights that `index` names from a folder of offloaded weights; None or empty does nothing."""
    if not index:
        return
    loader = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        owner_name, _, key = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        registry: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
        registry[key] = like(registry[key], loader[name])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is not a dtype of torch")
    return dtype
