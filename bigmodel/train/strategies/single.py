"""One process that owns the whole model: the trivial strategy, and the base class of those with whole copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from bigmodel.train.checkpoint_files import load_into, load_object, numbered, save_object, save_weights
from bigmodel.train.strategies.base import Strategy
from bigmodel.train.types import DistributedType


class SingleProcess(Strategy):
    """No wrapper, no communication; each file is written by one process and read by every process."""

    distributed_type: ClassVar[DistributedType] = DistributedType.NO

    def prepare_model(self, model: nn.Module, *, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """Move the model to this process's device."""
        return model.to(self.settings.device) if device_placement else model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model as it is."""
        return model

    def save_model(
        self, model: nn.Module, directory: Path, index: int, *, safe_serialization: bool = True, writes: bool = True
    ) -> None:
        """Write one file, `model.safetensors` or `pytorch_model.bin` (`..._1` for the second model)."""
        if writes:
            save_weights(self.unwrap(model).state_dict(), directory, index, safe_serialization=safe_serialization)

    def load_model(self, model: nn.Module, directory: Path, index: int, *, strict: bool = True) -> None:
        """Read the file back into the model's own tensors."""
        load_into(self.unwrap(model), directory, index, strict=strict)

    def save_optimizer(
        self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int, *, writes: bool = True
    ) -> None:
        """Write `optimizer.bin` (`optimizer_1.bin` for the second optimizer)."""
        if writes:
            save_object(optimizer.state_dict(), directory / numbered("optimizer.bin", index))

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int) -> None:
        """Read the optimizer's state back."""
        state: Any = load_object(directory / numbered("optimizer.bin", index))
        optimizer.load_state_dict(state)
