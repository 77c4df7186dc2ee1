"""What strategies with DTensors write and read back: checkpoints, in shards or one file, and whole weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from bigmodel.errors import BigModelError, TrainError
from bigmodel.train.files.objects import load_object, numbered, save_object
from bigmodel.train.files.weights import load_weights, save_weights
from bigmodel.train.strategies.base import Strategy
from bigmodel.train.strategies.distributed_files import load_folder, save_folder

MODEL_FOLDER = "pytorch_model_fsdp"
OPTIMIZER_FOLDER = "optimizer"


class ShardedFiles(Strategy):
    """The part of the strategy that has to do with files."""

    _models: list[nn.Module]

    @property
    def writes_shards(self) -> bool:
        """Whether checkpoints are folders to which every rank adds its shards (else one file)."""
        return False

    def gathered_weights(self, model: nn.Module) -> dict[str, Any]:
        """Gather the full weights in RAM on rank 0; other ranks get {}."""
        return get_model_state_dict(model, options=_FULL)

    # -- training checkpoints ----------------------------------------------------------------------------------

    def save_model(self, model: nn.Module, directory: Path, index: int, *, safe_serialization: bool = True) -> None:
        """Write shards under `pytorch_model_fsdp_<index>`, or one file from rank 0."""
        if self.writes_shards:
            save_folder({"model": get_model_state_dict(model)}, directory / f"{MODEL_FOLDER}_{index}")
            return
        state = self.gathered_weights(model)
        if self.settings.process_index == 0:
            save_weights(state, directory, index, safe_serialization=safe_serialization)

    def load_model(self, model: nn.Module, directory: Path, index: int, *, strict: bool = True) -> None:
        """Read shards (also written by another number of ranks), or rank 0's file, into the sharded model."""
        folder = directory / f"{MODEL_FOLDER}_{index}"
        if folder.is_dir():
            state = {"model": get_model_state_dict(model)}
            load_folder(state, folder, strict=strict)
            set_model_state_dict(model, state["model"], options=StateDictOptions(strict=strict))
            return
        full = self._read_on_first(lambda: load_weights(directory, index))
        set_model_state_dict(model, full, options=_from_rank_0(strict))

    def save_optimizer(self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int) -> None:
        """Write state by parameter name: shards under `optimizer_<index>`, or one file from rank 0."""
        model = self._known(model)
        if self.writes_shards:
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            save_folder(state, directory / f"{OPTIMIZER_FOLDER}_{index}")
            return
        full = get_optimizer_state_dict(model, optimizer, options=_FULL)
        if self.settings.process_index == 0:
            save_object(full, directory / numbered("optimizer.bin", index))

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int) -> None:
        """Read back what `save_optimizer` wrote, also on another number of ranks."""
        model = self._known(model)
        folder = directory / f"{OPTIMIZER_FOLDER}_{index}"
        if folder.is_dir():
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            load_folder(state, folder)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            return
        path = directory / numbered("optimizer.bin", index)
        full = self._read_on_first(lambda: load_object(path))
        # An optimizer without tensors (SGD without momentum): PyTorch would look for the device of the first of them.
        plain: list[Any] = [None if any(full.get("state", {}).values()) else full]
        dist.broadcast_object_list(plain, src=0, device=self.settings.device)
        if plain[0] is not None:
            set_optimizer_state_dict(model, optimizer, plain[0])
        else:
            set_optimizer_state_dict(model, optimizer, full, options=_from_rank_0(True))

    def _read_on_first(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `read` gives on rank 0; {} on the others. A failure of rank 0 is raised on all of them."""
        found: dict[str, Any] = {}
        failure: list[BaseException | None] = [None]
        if self.settings.process_index == 0:
            try:
                found = read()
            except BigModelError as error:
                failure = [error]
        dist.broadcast_object_list(failure, src=0, device=self.settings.device)
        if failure[0] is not None:
            raise failure[0]
        return found

    def _known(self, model: nn.Module | None) -> nn.Module:
        if model is not None:
            return model
        if len(self._models) != 1:
            raise TrainError(
                "an optimizer's sharded state is stored by the names of its model's parameters, and no prepared model "
                "has these parameters; prepare the model and its optimizer in one call"
            )
        return self._models[0]


_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _from_rank_0(strict: bool) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
