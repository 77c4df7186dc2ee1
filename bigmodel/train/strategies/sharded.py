"""What FSDP2 and tensor parallelism share: parameters that are DTensors, prepared, clipped and stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bigmodel.train.scaling import LossScaler
from bigmodel.train.strategies.clipping import clip_grad_norm, local_part
from bigmodel.train.strategies.placing import check_same_structure
from bigmodel.train.strategies.remap import ParameterMap
from bigmodel.train.strategies.settings import StrategySettings
from bigmodel.train.strategies.sharded_files import ShardedFiles
from bigmodel.train.strategies.sharded_scaler import ShardedGradScaler


class ShardedStrategy(ShardedFiles):
    """Base of the strategies whose parameters are distributed tensors. Subclasses say how a model is sharded."""

    def __init__(self, settings: StrategySettings) -> None:
        super().__init__(settings)
        self._parameters = ParameterMap()
        self._models: list[nn.Module] = []

    # -- preparing ---------------------------------------------------------------------------------------------

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard `model` in place and return it."""
        raise NotImplementedError

    def prepare_together(self, objects: Sequence[Any], device_placement: Sequence[bool]) -> dict[int, Any]:
        """Shard every model first, then point the optimizers at the parameters the models have now."""
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
        """Return the model as it is: its parameters are sharded, its class is unchanged."""
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
        """Step, pointing the optimizer at the sharded parameters if it was made for the whole ones."""
        self._parameters.repoint(optimizer)
        return super().optimizer_step(optimizer, scaler, closure)

    def _now(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        return [self._parameters.current(parameter) for parameter in given]
