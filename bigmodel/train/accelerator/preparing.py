"""`prepare`: adapts models, optimizers, loaders and schedulers to the run. `unwrap_model` undoes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.data.loader import DataLoaderShard
from bigmodel.train.data.prepare import prepare_data_loader, skip_first_batches
from bigmodel.train.dispatched import check_one_process, check_quantized
from bigmodel.train.handlers import AORecipeKwargs
from bigmodel.train.optimizer import AcceleratedOptimizer, move_state_to_parameters
from bigmodel.train.precision.mixed import MixedPrecisionForward, convert_to_fp8
from bigmodel.train.scheduler import AcceleratedScheduler
from bigmodel.train.wrappers import bare_model, compile_model

T = TypeVar("T")


class PreparingModels(AcceleratorCore):
    """Preparation of models."""

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to the device, set its forward's precision, wrap and compile it.

        Args:
            model: the model.
            device_placement: whether to move it; None: the Accelerator's setting.
            evaluation_mode: the model will not be trained, so it needs no wrapper for gradients.

        Raises:
            TrainError: the model is dispatched over devices and there are several processes, or weights to be trained
                that were tied are on two devices.
        """
        if self._has_prepared(model):
            return model
        if not evaluation_mode:
            self._ready_dispatched([model], [])
        self._use_selected_plugin()
        placed = self.device_placement if device_placement is None else device_placement
        return self._place_and_wrap(self._in_precision(model), placed, evaluation_mode)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model that was given to `prepare`.

        Args:
            model: the prepared model.
            keep_fp32_wrapper: keep its forward in mixed precision; otherwise restore the plain forward.
            keep_torch_compile: keep it compiled.
        """
        return bare_model(model, self.strategy.unwrap, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model or a part of it is dispatched over several devices (False with `BYPASS_DEVICE_MAP`)."""
        if environment.flag(environment.BYPASS_DEVICE_MAP):
            return False
        return any(len(set(getattr(module, "hf_device_map", {}).values())) > 1 for module in model.modules())

    def _has_prepared(self, model: nn.Module) -> bool:
        return any(model is known for known in self._models)

    def _ready_dispatched(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Prepare dispatched models for these optimizers; with several processes they are refused later."""
        if not self.state.use_distributed:
            self._dispatched.ready(models, optimizers)

    def _use_selected_plugin(self) -> None:
        """Prepare by the plugin that is active now: `select_deepspeed_plugin` may have chosen another."""
        if self.state.deepspeed_plugin is not None:
            self.strategy.use_plugin(self.state.deepspeed_plugin)

    def _in_precision(self, model: nn.Module) -> nn.Module:
        """Check that the model can be trained here, and set its forward's precision."""
        check_quantized(model)
        check_one_process(model, self.state.use_distributed, self.verify_device_map(model))
        if self.mixed_precision == "fp8":
            model = convert_to_fp8(model, self.device, self.handlers.get(AORecipeKwargs))
        if self.mixed_precision != "no" and self.strategy.autocast_forward:
            MixedPrecisionForward.install(model, self.mixed_precision, self.device, self.autocast_handler)
        return model

    def _place_and_wrap(self, model: nn.Module, placed: bool, evaluation_mode: bool = False) -> nn.Module:
        placed = placed and not hasattr(model, "hf_device_map")  # a dispatched model is not moved
        wrapped = self.strategy.prepare_model(model, device_placement=placed, evaluation_mode=evaluation_mode)
        return self._finish_model(wrapped)

    def _finish_model(self, model: nn.Module) -> nn.Module:
        if self.state.dynamo_plugin.enabled:
            model = compile_model(model, self.state.dynamo_plugin)
        self._models.append(model)
        return _marked(model)


def _marked(prepared: T) -> T:
    """Mark an object as prepared, for programs that ask."""
    prepared._is_accelerate_prepared = True  # type: ignore[attr-defined]
    return prepared


def those(kind: type[Any], objects: Sequence[Any]) -> list[Any]:
    """Return those of `objects` that are of class `kind`."""
    return [obj for obj in objects if isinstance(obj, kind)]


def is_model(obj: Any) -> bool:
    """Whether `obj` is a model."""
    return isinstance(obj, nn.Module)


def is_loader(obj: Any) -> bool:
    """Whether `obj` is a data loader."""
    return isinstance(obj, DataLoader)


def is_optimizer(obj: Any) -> bool:
    """Whether `obj` is an optimizer."""
    return isinstance(obj, torch.optim.Optimizer)


def is_scheduler(obj: Any) -> bool:
    """Whether `obj` is a scheduler, by type or by its methods."""
    return isinstance(obj, LRScheduler) or (
        not isinstance(obj, (AcceleratedScheduler, torch.optim.Optimizer, nn.Module, DataLoader))
        and all(hasattr(obj, name) for name in ("step", "state_dict", "load_state_dict", "get_last_lr"))
    )


ORDER: tuple[Callable[[Any], bool], ...] = (is_loader, is_model, is_optimizer)
"""The order in which kinds are prepared; schedulers come last, since they look up their optimizers."""


class Preparing(PreparingModels):
    """The `prepare` family."""

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, given in any order.

        A dispatched model keeps its device map, and is streamed again in each backward pass. Of the weights that the
        optimizer changes, those on disk become private copies in host memory (the checkpoint never changes), and those
        on an accelerator without memory for their gradients and optimizer state move to the host. The optimizer's state
        is on the devices of the weights. Adapters added to the model after it was dispatched are dispatched too.

        Args:
            args: the objects; objects of other kinds are returned unchanged.
            device_placement: for each object, whether to move it to the device. Only for models and data loaders.

        Returns:
            The prepared objects in the same order; for one argument, the object itself.

        Raises:
            TrainError: `device_placement` has another length, or a dispatched model cannot be trained here; the message
                gives the reason.
        """
        if device_placement is None:
            device_placement = [self.device_placement] * len(args)
        elif len(device_placement) != len(args):
            raise TrainError(f"device_placement has {len(device_placement)} entries for {len(args)} objects")
        self._use_selected_plugin()
        fresh = [None if self._is_prepared(obj) else obj for obj in args]
        self._ready_dispatched(those(nn.Module, fresh), those(Optimizer, fresh))
        precise = [self._in_precision(obj) if isinstance(obj, nn.Module) else obj for obj in fresh]
        together = self.strategy.prepare_together(precise, device_placement)
        result = list(args)
        for position, prepared in together.items():
            result[position] = self._register(prepared)
        for kind in ORDER:
            for position, obj in enumerate(args):
                if fresh[position] is not None and position not in together and kind(obj):
                    result[position] = self._prepare_one(precise[position], device_placement[position])
        for position, obj in enumerate(result):
            if is_scheduler(obj):
                result[position] = self.prepare_scheduler(obj)
        return result[0] if len(result) == 1 else tuple(result)

    def _is_prepared(self, obj: Any) -> bool:
        if isinstance(obj, (DataLoaderShard, AcceleratedOptimizer, AcceleratedScheduler)):
            return True
        return isinstance(obj, nn.Module) and self._has_prepared(obj)

    def _register(self, prepared: Any) -> Any:
        """Add an object that the strategy has prepared together with others to the Accelerator's lists."""
        if isinstance(prepared, nn.Module):
            return self._finish_model(prepared)
        if isinstance(prepared, Optimizer):
            return self.prepare_optimizer(prepared)
        return prepared

    def _prepare_one(self, obj: Any, device_placement: bool) -> Any:
        if isinstance(obj, DataLoader):
            return self.prepare_data_loader(obj, device_placement)
        if isinstance(obj, nn.Module):
            return self._place_and_wrap(obj, device_placement)
        return self.prepare_optimizer(obj)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer, and move its state to the devices of its parameters."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        self._ready_dispatched(self._models, [optimizer])
        move_state_to_parameters(optimizer)
        wrapped = AcceleratedOptimizer(optimizer, self.strategy, self._scaler)
        self._optimizers.append(wrapped)
        return _marked(wrapped)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler; it follows the prepared optimizer that it was created for, else all prepared optimizers."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        own = [
            optimizer
            for optimizer in self._optimizers
            if getattr(scheduler, "optimizer", None) in (optimizer, optimizer.optimizer)
        ]
        wrapped = AcceleratedScheduler(
            scheduler,
            own or self._optimizers,
            self.step_scheduler_with_optimizer,
            self.dataloader_config.split_batches,
            self.strategy.data_parallel()[0],
        )
        self._schedulers.append(wrapped)
        return _marked(wrapped)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoaderShard:
        """Return a loader of this process's part of the data, on its device."""
        if isinstance(data_loader, DataLoaderShard):
            return data_loader
        config = self.dataloader_config
        replicas, index = self.strategy.data_parallel()
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=replicas,
            process_index=index,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return _marked(prepared)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a copy of the loader that skips its first batches, to finish an interrupted epoch."""
        return skip_first_batches(dataloader, num_batches)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Not supported."""
        raise TrainError("sequence parallelism is not supported; use tensor parallelism (tp_size) or FSDP2")
