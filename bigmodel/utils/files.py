"""File names of checkpoints, and saving and loading a single object."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from bigmodel.train.checkpoint_files import NUMPY_GLOBALS, load_object, save_any, write_safetensors
from bigmodel.train.state.partial import PartialState
from bigmodel.utils.models import id_tensor_storage

MODEL_NAME = "pytorch_model"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"

np_core: Any = getattr(np, "_core", None) or np.core
"""The module of numpy's arrays, which older versions call ``core``."""

TORCH_SAFE_GLOBALS = NUMPY_GLOBALS
"""Classes that files may hold beside tensors, numbers and strings: arrays of numpy."""


def save(
    obj: Any, f: str | os.PathLike[str] | IO[bytes], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object on the main process only (that of each machine, if `save_on_each_node`).

    Args:
        f: path, or an open file, which is not written as safetensors.
        safe_serialization: write a dict of tensors as safetensors, else `torch.save`'s format.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
        return
    path = Path(f)
    if safe_serialization:
        write_safetensors(obj, path)
    else:
        save_any(obj, path)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Read an object written by `save`. No code in the file is run, unless `weights_only` is False.

    Args:
        f: path, or an open file in `torch.save`'s format.
        map_location: device of the tensors; the CPU by default.
        kwargs: of `torch.load`: `mmap`, whether to map the file instead of reading it, and others.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointFormatError: the file is damaged, or holds objects that are not allowed.
    """
    if not isinstance(f, (str, os.PathLike)) or set(kwargs) - {"mmap"}:
        with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
            return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})
    path = Path(f)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path, device=str(map_location or "cpu"))
    return load_object(path, map_location or "cpu", **kwargs)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return tensors that a safetensors file can hold: contiguous, and each memory under its first name.

    Further names of a memory are deleted from `state_dict`, with a warning that lists them.
    """
    names: defaultdict[Any, list[str]] = defaultdict(list)
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor):
            names[id_tensor_storage(tensor)].append(name)
    others = [name for group in names.values() for name in group[1:]]
    for name in others:
        del state_dict[name]
    if others:
        logging.getLogger(__name__).warning("tied tensors are saved under their first names, without %s", others)
    return {name: each.contiguous() if isinstance(each, torch.Tensor) else each for name, each in state_dict.items()}
