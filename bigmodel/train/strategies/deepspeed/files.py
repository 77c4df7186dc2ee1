"""Files of DeepSpeed engines: checkpoints to which each rank writes its part, and whole weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError
from bigmodel.train.strategies.deepspeed.plugin import DeepSpeedPlugin
from bigmodel.train.strategies.single import SingleProcess

# What DeepSpeed's own checkpoints hold beside tensors, numbers and strings.
_CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)


class DeepSpeedFiles(SingleProcess):
    """The part of the strategy that has to do with files; models without an engine are written whole."""

    plugin: DeepSpeedPlugin
    _engines: list[Any]
    _engine_of_optimizer: dict[int, Any]

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the engine."""
        return model.module if self._is_engine(model) else model  # type: ignore[return-value]

    def _is_engine(self, model: Any) -> bool:
        return any(model is engine for engine in self._engines)

    def gathered_weights(self, model: nn.Module) -> dict[str, Any] | None:
        """Gather the full weights of stage 3 in RAM on rank 0, one parameter at a time."""
        if self._is_engine(model) and model.zero_optimization_stage() == 3:  # type: ignore[operator]
            return gathered_state_dict(self.unwrap(model), keep=self.settings.process_index == 0)
        return None

    # -- training checkpoints ----------------------------------------------------------------------------------

    def save_model(
        self, model: nn.Module, directory: Path, index: int, *, safe_serialization: bool = True, writes: bool = True
    ) -> None:
        """Let the engine write model and optimizer state, each rank its part, under `pytorch_model[_<index>]`."""
        if not self._is_engine(model):
            super().save_model(model, directory, index, safe_serialization=safe_serialization, writes=writes)
            return
        model.save_checkpoint(str(directory), tag=_tag(index), save_latest=index == 0)  # type: ignore[operator]

    def load_model(self, model: nn.Module, directory: Path, index: int, *, strict: bool = True) -> None:
        """Read model and optimizer state back into the engine. No code in the files is run."""
        if not self._is_engine(model):
            super().load_model(model, directory, index, strict=strict)
            return
        engine: Any = model
        if not (directory / _tag(index)).is_dir():
            raise CheckpointNotFoundError(f"{directory / _tag(index)} is not there")
        engine.checkpoint_engine = safe_checkpoint_engine()
        path, _ = engine.load_checkpoint(
            str(directory), tag=_tag(index), load_module_strict=strict, load_lr_scheduler_states=False
        )
        if path is None:
            raise CheckpointNotFoundError(f"DeepSpeed found no checkpoint in {directory / _tag(index)}")

    def save_optimizer(
        self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int, *, writes: bool = True
    ) -> None:
        """Nothing for an engine's optimizer: `save_model` has written it."""
        if id(optimizer) not in self._engine_of_optimizer:
            super().save_optimizer(optimizer, model, directory, index, writes=writes)

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int) -> None:
        """Nothing for an engine's optimizer: `load_model` has read it."""
        if id(optimizer) not in self._engine_of_optimizer:
            super().load_optimizer(optimizer, model, directory, index)


def _tag(index: int) -> str:
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def gathered_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The full state dict of a module whose parameters ZeRO-3 has sharded; every rank calls it.

    Args:
        keep: put the values in RAM on this rank; otherwise the answer is {}.
    """
    import deepspeed

    state: dict[str, Any] = {}
    copies: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in copies:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
                copies[id(parameter)] = parameter.detach().cpu().clone() if keep else torch.empty(0)
        state[name] = copies[id(parameter)]
    buffers = {name: value for name, value in module.state_dict().items() if name not in state}
    state.update({name: value.detach().cpu() for name, value in buffers.items()})
    return state if keep else {}


def safe_checkpoint_engine() -> Any:
    """A reader of DeepSpeed's files that runs no code in them: tensors, numbers, and four classes of DeepSpeed."""
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    class SafeCheckpointEngine(TorchCheckpointEngine):
        def load(self, path: str, map_location: Any = None) -> Any:
            refused = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - set(_CLASSES)
            if refused:
                raise CheckpointFormatError(
                    f"{path} holds objects of {', '.join(sorted(refused))}, which no DeepSpeed checkpoint contains"
                )
            with torch.serialization.safe_globals([_class(name) for name in _CLASSES]):
                return torch.load(path, map_location=map_location, weights_only=True)

    return SafeCheckpointEngine()


def _class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
