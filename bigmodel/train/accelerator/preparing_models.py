"""Models made ready for the run, and given back as they were."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from bigmodel.train import environment
from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.compiling import compile_model
from bigmodel.train.dispatched import check_one_process
from bigmodel.train.fp8 import convert_to_fp8
from bigmodel.train.handlers import AORecipeKwargs
from bigmodel.train.precision import MixedPrecisionForward
from bigmodel.train.unwrapping import bare_model


class PreparingModels(AcceleratorCore):
    """What `prepare` does with models."""

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to the device, run its forward in the precision in force, wrap and compile it.

        Args:
            device_placement: whether to move it; as the Accelerator says by default.
            evaluation_mode: the model will not be trained, and needs no wrapper for gradients.
        """
        if self._has_prepared(model):
            return model
        placed = self.device_placement if device_placement is None else device_placement
        return self._place_and_wrap(self._in_precision(model), placed, evaluation_mode)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model that was given to `prepare`.

        Args:
            keep_fp32_wrapper: keep its forward in mixed precision; else give back the plain forward.
            keep_torch_compile: keep it compiled.
        """
        return bare_model(model, self.strategy.unwrap, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model, or a part of it, is dispatched over several devices (unless told to ignore that)."""
        if environment.flag(environment.BYPASS_DEVICE_MAP):
            return False
        return any(len(set(getattr(module, "hf_device_map", {}).values())) > 1 for module in model.modules())

    def _has_prepared(self, model: nn.Module) -> bool:
        return any(model is known for known in self._models)

    def _ready_dispatched(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Let dispatched models be trained by these optimizers; with several processes they are refused later."""
        if not self.state.use_distributed:
            self._dispatched.ready(models, optimizers)

    def _in_precision(self, model: nn.Module) -> nn.Module:
        """Check that the model can be trained here, and let its forward run in the precision in force."""
        check_one_process(model, self.state.use_distributed, self.verify_device_map(model))
        if self.mixed_precision == "fp8":
            model = convert_to_fp8(model, self.device, self.handlers.get(AORecipeKwargs))
        if self.mixed_precision != "no" and self.strategy.autocast_forward:
            MixedPrecisionForward.install(model, self.mixed_precision, self.device, self.autocast_handler)
        return model

    def _place_and_wrap(self, model: nn.Module, placed: bool, evaluation_mode: bool = False) -> nn.Module:
        placed = placed and not hasattr(model, "hf_device_map")  # a dispatched model lies where it should
        wrapped = self.strategy.prepare_model(model, device_placement=placed, evaluation_mode=evaluation_mode)
        return self._finish_model(wrapped)

    def _finish_model(self, model: nn.Module) -> nn.Module:
        if self.state.dynamo_plugin.enabled:
            model = compile_model(model, self.state.dynamo_plugin)
        self._models.append(model)
        return model
