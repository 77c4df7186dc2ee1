"""Base class of strategies with DTensor parameters (FSDP2, tensor parallelism): prepare, clip, step, save and load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from bigmodel.errors import BigModelError, TrainError
from bigmodel.train.checkpoint_files import load_object, load_weights, numbered, save_object, save_weights
from bigmodel.train.precision.scaling import LossScaler
from bigmodel.train.strategies.base import Strategy, StrategySettings
from bigmodel.train.strategies.remap import ParameterMap
from bigmodel.train.strategies.sharded.distributed_files import load_folder, save_folder
from bigmodel.train.strategies.sharded.gradients import ShardedGradScaler, clip_grad_norm, local_part
from bigmodel.train.strategies.sharded.placing import check_same_structure

MODEL_FOLDER = "pytorch_model_fsdp"
OPTIMIZER_FOLDER = "optimizer"


class ShardedFiles(Strategy):
    """The part of the strategy that reads and writes files."""

    _models: list[nn.Module]

    @property
    def writes_shards(self) -> bool:
        """Whether checkpoints are folders to which every rank adds its shards (else one file)."""
        return False

    def gathered_weights(self, model: nn.Module) -> dict[str, Any]:
        """Gather the full weights in RAM on rank 0; other ranks get {}."""
        return get_model_state_dict(model, options=_FULL)

    # -- training checkpoints ----------------------------------------------------------------------------------

    def save_model(
        self, model: nn.Module, directory: Path, index: int, *, safe_serialization: bool = True, writes: bool = True
    ) -> None:
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

    def save_gathered(self, model: nn.Module, path: Path) -> None:
        """Write the full weights to one file, from rank 0."""
        full = self.gathered_weights(model)
        if self.settings.process_index == 0:
            save_object(full, path)

    def load_gathered(self, model: nn.Module, path: Path) -> None:
        """Read into the sharded model what `save_gathered` wrote; only rank 0 needs the file."""
        full = self._read_on_first(lambda: load_object(path))
        set_model_state_dict(model, full, options=_from_rank_0(True))

    def save_optimizer(
        self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int, *, writes: bool = True
    ) -> None:
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
        # For an optimizer without tensors (SGD without momentum) PyTorch fails to determine the device.
        plain: list[Any] = [None if any(full.get("state", {}).values()) else full]
        dist.broadcast_object_list(plain, src=0, device=self.settings.device)
        if plain[0] is not None:
            set_optimizer_state_dict(model, optimizer, plain[0])
        else:
            set_optimizer_state_dict(model, optimizer, full, options=_from_rank_0(True))

    def _read_on_first(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return ``read()`` on rank 0, {} on the others. An error of rank 0 is raised on all ranks."""
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


class ShardedStrategy(ShardedFiles):
    """Base class of strategies whose parameters are distributed tensors. Subclasses define how a model is sharded."""

    def __init__(self, settings: StrategySettings) -> None:
        super().__init__(settings)
        self._parameters = ParameterMap()
        self._models: list[nn.Module] = []

    # -- preparing ---------------------------------------------------------------------------------------------

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard `model` in place and return it."""
        raise NotImplementedError

    def prepare_together(self, objects: Sequence[Any], device_placement: Sequence[bool]) -> dict[int, Any]:
        """Shard every model, then replace the parameters in the optimizers by the sharded ones."""
        prepared: dict[int, Any] = {}
        for position, item in enumerate(objects):
            if isinstance(item, nn.Module):
                prepared[position] = self.prepare_model(item, device_placement=True, evaluation_mode=False)
        for position, item in enumerate(objects):
            if isinstance(item, Optimizer):
                self._parameters.repoint(item)
                prepared[position] = item
        return prepared

    def prepare_model(self, model: nn.Module, *, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """Shard the model over the ranks; its weights are rank 0's."""
        if not any(model is known for known in self._models):
            check_same_structure(model)
            self._parameters.remember(model)
            model = self.shard(model)
            self._parameters.learn(model)
            self._models.append(model)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself: it has no wrapper."""
        return model

    def free(self) -> None:
        """Forget the models."""
        self._models.clear()
        self._parameters = ParameterMap()

    def make_grad_scaler(self, **kwargs: Any) -> Any:
        """Return a scaler that skips a step on every rank when one rank's gradients overflow."""
        return ShardedGradScaler(self.settings.device, **kwargs)

    # -- one step ----------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip by the norm over the parts on all ranks."""
        return clip_grad_norm(self._now(parameters), max_norm, float(norm_type), self.settings.device)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp this rank's parts."""
        for parameter in self._now(parameters):
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-clip_value, clip_value)

    def optimizer_step(
        self, optimizer: Optimizer, scaler: LossScaler | None = None, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step, after replacing whole parameters in the optimizer by the sharded ones if necessary."""
        self._parameters.repoint(optimizer)
        return super().optimizer_step(optimizer, scaler, closure)

    def _now(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        return [self._parameters.current(parameter) for parameter in given]
