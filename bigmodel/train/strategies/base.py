"""The interface of every strategy: how one or several processes train a model.

The Accelerator does not ask which strategy it has; it calls these methods. `SingleProcess` is the trivial
implementation; `DistributedDataParallel`, FSDP2, DeepSpeed and tensor parallelism override what differs.

`Accelerator.prepare(*objects)` calls them in this order:

1. `prepare_together(objects)` may prepare several of the objects as one (FSDP2 and DeepSpeed need the optimizer
   together with its model); it returns the prepared objects by position.
2. The remaining models go through `prepare_model`.
3. Every optimizer is wrapped in an `AcceleratedOptimizer`, which calls `optimizer_step` and `zero_grad`;
   schedulers are wrapped in an `AcceleratedScheduler`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigmodel.train.precision.host_gradients import HostGradScaler
from bigmodel.train.precision.scaling import LossScaler
from bigmodel.train.types import DistributedType


@dataclass(frozen=True)
class StrategySettings:
    """Settings of a run that strategies use.

    Attributes:
        device: the device of this process.
        num_processes: number of processes; `process_index` and `local_process_index` are this process's ranks.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        gradient_accumulation_steps: backward passes per optimizer step when the strategy was created.
        plugin: the plugin of the strategy (`FullyShardedDataParallelPlugin`, `DeepSpeedPlugin`, ...), or None.
        parallelism_config: the `ParallelismConfig` given to the Accelerator, or None.
        device_mesh: the mesh built from it, or None.
        handlers: the `kwargs_handlers` given to the Accelerator, by class.
    """

    device: torch.device
    num_processes: int = 1
    process_index: int = 0
    local_process_index: int = 0
    mixed_precision: str = "no"
    gradient_accumulation_steps: int = 1
    plugin: Any = None
    parallelism_config: Any = None
    device_mesh: Any = None
    handlers: dict[type, Any] = field(default_factory=dict)


STRATEGIES: dict[DistributedType, str] = {
    DistributedType.NO: "bigmodel.train.strategies.single:SingleProcess",
    DistributedType.MULTI_CPU: "bigmodel.train.strategies.ddp:DistributedDataParallel",
    DistributedType.MULTI_GPU: "bigmodel.train.strategies.ddp:DistributedDataParallel",
    DistributedType.FSDP: "bigmodel.train.strategies.sharded.fsdp:FullyShardedDataParallel",
    DistributedType.DEEPSPEED: "bigmodel.train.strategies.deepspeed.strategy:DeepSpeed",
    DistributedType.TP: "bigmodel.train.strategies.sharded.tensor_parallel:TensorParallel",
}


def make_strategy(distributed_type: DistributedType, settings: StrategySettings) -> Strategy:
    """Return the strategy for `distributed_type`, made with `settings`."""
    strategy: Strategy = load(STRATEGIES[distributed_type])(settings)
    return strategy


PLUGINS: dict[DistributedType, str] = {
    DistributedType.FSDP: "bigmodel.train.strategies.sharded.fsdp_plugin:FullyShardedDataParallelPlugin",
    DistributedType.DEEPSPEED: "bigmodel.train.strategies.deepspeed.plugin:DeepSpeedPlugin",
}
"""The plugin that configures a strategy; without arguments it reads the launcher's variables."""

PARALLELISM_CONFIG = "bigmodel.train.strategies.sharded.parallelism:ParallelismConfig"


def load(name: str) -> Any:
    """Import the object that "module:attribute" names."""
    module_name, attribute = name.split(":")
    return getattr(import_module(module_name), attribute)


class Strategy(ABC):
    """Wraps models, computes and applies gradients, and saves training state.

    The defaults are those of one process that owns the whole model; subclasses override what differs.
    """

    distributed_type: ClassVar[DistributedType] = DistributedType.NO

    autocast_forward: ClassVar[bool] = True
    """Whether the Accelerator runs a prepared model's forward under autocast (False: the strategy casts)."""

    uses_grad_scaler: ClassVar[bool] = True
    """Whether fp16 needs the Accelerator's gradient scaler (False: the strategy scales losses by itself)."""

    divides_loss: ClassVar[bool] = False
    """Whether the strategy divides the loss by the accumulation steps by itself."""

    def __init__(self, settings: StrategySettings) -> None:
        self.settings = settings

    # -- preparing ---------------------------------------------------------------------------------------------

    def use_plugin(self, plugin: Any) -> None:  # noqa: B027
        """Prepare objects by this plugin from now on; those that are prepared stay as they are."""

    @property
    def engine(self) -> Any:
        """Another library's object that trains the first prepared model; None where there is none."""
        return None

    def prepare_together(self, objects: Sequence[Any], device_placement: Sequence[bool]) -> dict[int, Any]:
        """Prepare those of `objects` that must be prepared as one; return them by position.

        Optimizers and schedulers are returned bare (the Accelerator wraps them); models are returned wrapped and on
        their device. Data loaders are passed only so that batch sizes can be read.
        """
        return {}

    @abstractmethod
    def prepare_model(self, model: nn.Module, *, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """Move `model` to its device and wrap it."""

    def make_grad_scaler(self, **kwargs: Any) -> Any:
        """Return the `torch.amp.GradScaler` for fp16 on this strategy's device."""
        return HostGradScaler(self.settings.device.type, **kwargs)

    # -- one step ----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, scaler: LossScaler | None = None, **kwargs: Any) -> None:
        """Back-propagate `loss`, already divided by the accumulation steps unless `divides_loss`."""
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward(**kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context within which backward passes leave gradients local."""
        return nullcontext()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward synchronises gradients even if the forward ran under `no_sync`."""
        return nullcontext()

    def set_sync_gradients(self, value: bool) -> None:  # noqa: B027
        """Set whether the next backward ends an accumulation window."""

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale the gradients so that their total norm is at most `max_norm`; return the norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    def optimizer_step(
        self, optimizer: Optimizer, scaler: LossScaler | None = None, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Apply the gradients; return False if the step was skipped because they overflowed."""
        if scaler is not None:
            return scaler.step(optimizer, closure)
        optimizer.step(closure) if closure is not None else optimizer.step()
        return True

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Clear the gradients of the optimizer's parameters."""
        if "set_to_none" in inspect.signature(optimizer.zero_grad).parameters:
            optimizer.zero_grad(set_to_none=set_to_none)
        else:  # an optimizer of the user's own, or of an older library
            optimizer.zero_grad()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different steps."""
        return nullcontext()

    # -- ranks -------------------------------------------------------------------------------------------------

    def data_parallel(self) -> tuple[int, int]:
        """Return (number of ranks that read different data, index of this rank among them)."""
        return self.settings.num_processes, self.settings.process_index

    @property
    def keeps_whole_models(self) -> bool:
        """Whether every rank has all parameters of every model, and steps its own optimizer."""
        return self.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes the result of `state_dict`."""
        return self.settings.process_index == 0

    # -- reading the model back --------------------------------------------------------------------------------

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model, without this strategy's wrapper."""

    def gathered_weights(self, model: nn.Module) -> dict[str, Any] | None:
        """Gather the full weights in RAM on rank 0 ({} on the others); None where every rank has them already.

        Every rank calls it.
        """
        return None

    def state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict. Every rank calls it; ranks where `should_save_model` is False may get {}."""
        gathered = self.gathered_weights(model)
        return dict((self.unwrap(model) if unwrap else model).state_dict()) if gathered is None else gathered

    def export_model(
        self,
        model: nn.Module,
        directory: Path,
        max_shard_size: int | str,
        *,
        safe_serialization: bool = True,
        writes: bool = True,
    ) -> None:
        """Write the model's weights in shards for others to read. Every rank calls it.

        Those that `writes` write; where weights are gathered, rank 0, which alone has them.
        """
        from bigmodel.checkpoint import save_model

        gathered, plain = self.gathered_weights(model), self.unwrap(model)
        if gathered is None and writes:
            save_model(plain, directory, max_shard_size, safe_serialization)
        elif gathered is not None and self.settings.process_index == 0:
            save_model(gathered, directory, max_shard_size, safe_serialization, config_of=plain)

    # -- training checkpoints ----------------------------------------------------------------------------------
    # Every rank calls these. Strategies that keep whole models may get a folder of its own on each rank; all others
    # get one folder, visible to all ranks. `index` numbers the prepared models (optimizers). The Accelerator makes the
    # folder appear under its final name only after every rank has returned.
    # Where one rank writes for all that share the folder, `writes` says whether it is this one. Nothing is written
    # before the method's last collective operation: a rank that cannot write raises, and none waits for it.

    @abstractmethod
    def save_model(
        self, model: nn.Module, directory: Path, index: int, *, safe_serialization: bool = True, writes: bool = True
    ) -> None:
        """Write the model's weights under `directory`."""

    @abstractmethod
    def load_model(self, model: nn.Module, directory: Path, index: int, *, strict: bool = True) -> None:
        """Read back what `save_model` wrote, into the prepared model, in place."""

    @abstractmethod
    def save_optimizer(
        self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int, *, writes: bool = True
    ) -> None:
        """Write the optimizer's state under `directory`. `model` is the prepared model it belongs to, if known."""

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, model: nn.Module | None, directory: Path, index: int) -> None:
        """Read back what `save_optimizer` wrote, into the bare optimizer, in place."""

    # -- the end -----------------------------------------------------------------------------------------------

    def free(self) -> None:  # noqa: B027
        """Drop every reference to prepared objects."""
