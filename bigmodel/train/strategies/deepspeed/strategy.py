"""DeepSpeed ZeRO: optimizer state, gradients and parameters sharded, in GPU memory, RAM or on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigmodel.errors import TrainError
from bigmodel.train.precision.scaling import LossScaler
from bigmodel.train.strategies.base import StrategySettings
from bigmodel.train.strategies.deepspeed.config import DummyOptim, DummyScheduler, EngineScheduler
from bigmodel.train.strategies.deepspeed.engine import gradient_norm, make_engine
from bigmodel.train.strategies.deepspeed.files import DeepSpeedFiles
from bigmodel.train.strategies.deepspeed.plugin import DeepSpeedPlugin
from bigmodel.train.strategies.remap import owners
from bigmodel.train.types import DistributedType


class DeepSpeed(DeepSpeedFiles):
    """Models and their optimizers become DeepSpeed engines. Models without an optimizer stay whole.

    The Accelerator counts accumulation; before each backward it sets whether that ends the engine's window.
    """

    distributed_type: ClassVar[DistributedType] = DistributedType.DEEPSPEED
    autocast_forward: ClassVar[bool] = False
    uses_grad_scaler: ClassVar[bool] = False

    def __init__(self, settings: StrategySettings) -> None:
        super().__init__(settings)
        self.use_plugin(settings.plugin or DeepSpeedPlugin())
        self._engines: list[Any] = []
        self._engine_of_optimizer: dict[int, Any] = {}
        self._sync = True
        self._last_used: Any = None

    # -- preparing ---------------------------------------------------------------------------------------------

    def use_plugin(self, plugin: DeepSpeedPlugin) -> None:
        """Create engines by this plugin from now on."""
        plugin.set_mixed_precision(self.settings.mixed_precision)
        self.plugin = plugin

    @property
    def engine(self) -> Any:
        """The first engine, None before there is one."""
        return next(iter(self._engines), None)

    def prepare_together(self, objects: Sequence[Any], device_placement: Sequence[bool]) -> dict[int, Any]:
        """Create an engine from each model and the optimizer of its parameters."""
        prepared: dict[int, Any] = {}
        optimizers = {i: item for i, item in enumerate(objects) if isinstance(item, (Optimizer, DummyOptim))}
        schedulers = {i: item for i, item in enumerate(objects) if isinstance(item, DummyScheduler)}
        for position, model in enumerate(objects):
            if not isinstance(model, nn.Module):
                continue
            own = [i for i, optimizer in optimizers.items() if owners(model, _parameters(optimizer))]
            if len(own) > 1:
                raise TrainError(f"{type(model).__name__} has {len(own)} optimizers; DeepSpeed takes one for a model")
            if not own:
                continue
            scheduler = next((i for i, s in schedulers.items() if s.optimizer is optimizers[own[0]]), None)
            dummy = None if scheduler is None else schedulers[scheduler]
            engine = make_engine(self.settings, self.plugin, model, optimizers[own[0]], dummy, objects)
            self._adopt(engine)
            prepared[position] = engine
            prepared[own[0]] = engine.basic_optimizer
            self._engine_of_optimizer[id(engine.basic_optimizer)] = engine
            if scheduler is not None:
                prepared[scheduler] = EngineScheduler(engine.lr_scheduler, engine.basic_optimizer)
        lost = [type(item).__name__ for i, item in optimizers.items() if i not in prepared]
        if lost:
            raise TrainError(
                f"{', '.join(lost)} was given without its model; DeepSpeed needs a model and its optimizer in one "
                "call of prepare"
            )
        return prepared

    def prepare_model(self, model: nn.Module, *, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """Move a model without an optimizer to its device; with stage 3 its parameters are sharded nevertheless, unless
        one has no dimension: DeepSpeed cannot send those."""
        if self.plugin.zero_stage != 3 or any(parameter.ndim == 0 for parameter in model.parameters()):
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        engine = make_engine(self.settings, self.plugin, model, None, None, ())
        self._adopt(engine)
        return engine

    def _adopt(self, engine: Any) -> None:
        self._engines.append(engine)
        self._last_used = engine

        def remember(module: nn.Module, arguments: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self._last_used = engine

        engine.register_forward_pre_hook(remember)

    def free(self) -> None:
        """Take the engines down."""
        for engine in self._engines:
            engine.destroy()
        self._engines.clear()
        self._engine_of_optimizer.clear()
        self._last_used = None

    # -- one step ----------------------------------------------------------------------------------------------

    def set_sync_gradients(self, value: bool) -> None:
        """Set whether the next backward ends the engines' accumulation window."""
        self._sync = value
        for engine in self._engines:
            engine.set_gradient_accumulation_boundary(value)

    def backward(self, loss: Tensor, scaler: LossScaler | None = None, **kwargs: Any) -> None:
        """Back-propagate through the engine whose model computed the loss: the last one that ran."""
        if self._last_used is None:
            raise TrainError("backward was called before any model was prepared with its optimizer")
        self._last_used.set_gradient_accumulation_boundary(self._sync)
        self._last_used.backward(loss, **{"scale_wrt_gas": False, **kwargs})

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Within this context backward passes do not end the accumulation window."""
        before = self._sync
        self.set_sync_gradients(False)
        try:
            yield
        finally:
            self.set_sync_gradients(before)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Within this context the backward ends the accumulation window."""
        self.set_sync_gradients(True)
        return nullcontext()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Have the engine's next step clip to `max_norm`; return the present norm of the gradients."""
        if float(norm_type) != 2.0:
            raise TrainError(f"DeepSpeed clips by the 2-norm only, not by the {norm_type}-norm")
        engine = self._last_used
        if engine is None or not hasattr(engine.optimizer, "clip_grad"):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        engine.optimizer.clip_grad = float(max_norm)
        return gradient_norm(engine)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp gradients; supported for stage 0 only, since sharded gradients are not on the parameters."""
        if any(engine.zero_optimization_stage() for engine in self._engines):
            raise TrainError("DeepSpeed ZeRO cannot clip single values; use clip_grad_norm_")
        super().clip_grad_value_(parameters, clip_value)

    def optimizer_step(
        self, optimizer: Optimizer, scaler: LossScaler | None = None, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step the optimizer's engine, which also clears the gradients."""
        if closure is not None:
            raise TrainError("DeepSpeed steps take no closure")
        engine = self._engine_of_optimizer.get(id(optimizer))
        if engine is None:
            return super().optimizer_step(optimizer, scaler)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        if hasattr(engine.optimizer, "clip_grad"):
            engine.optimizer.clip_grad = engine.gradient_clipping()
        return bool(engine.was_step_applied())

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Do nothing for an engine's optimizer: its step has cleared the gradients."""
        if id(optimizer) not in self._engine_of_optimizer:
            super().zero_grad(optimizer, set_to_none)


def _parameters(optimizer: Any) -> list[Tensor]:
    groups = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    found: list[torch.Tensor] = []
    for group in groups:
        found += group["params"] if isinstance(group, dict) else [group]
    return found
