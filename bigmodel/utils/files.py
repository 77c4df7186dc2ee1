"""File names of checkpoints, and saving and loading a single object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from bigmodel.train.checkpoint_files import load_object, save_any, write_safetensors
from bigmodel.train.state.partial import PartialState

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


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object on the main process only (that of each machine, if `save_on_each_node`).

    Args:
        safe_serialization: write a dict of tensors as safetensors, else `torch.save`'s format.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    path = Path(f)
    if safe_serialization:
        write_safetensors(obj, path)
    else:
        save_any(obj, path)


def load(f: str | os.PathLike[str], map_location: torch.device | str | None = None, **kwargs: Any) -> Any:
    """Read an object written by `save`. No code in the file is run.

    Args:
        map_location: device of the tensors; the CPU by default.
        kwargs: `mmap`, whether to map the file instead of reading it.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointFormatError: the file is damaged, or holds objects that are not allowed.
    """
    path = Path(f)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path, device=str(map_location or "cpu"))
    return load_object(path, map_location or "cpu", **kwargs)
