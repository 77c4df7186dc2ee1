"""Training of models that `dispatch_model` has distributed over an accelerator, host memory and disk."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from bigmodel.errors import DispatchError, TrainError
from bigmodel.train.precision.mixed import MixedPrecisionForward
from bigmodel.train.strategies.remap import ParameterMap


class DispatchedModels:
    """Prepares dispatched models for the optimizers that will train them, in any order of `prepare` calls."""

    def __init__(self) -> None:
        self._parameters = ParameterMap()

    def ready(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Move the weights that `optimizers` change to where they can be trained, and update the optimizers.

        See `bigmodel.dispatch.prepare_training` for the moves. Without an optimizer nothing moves: one that is never
        prepared may change all that requires a gradient.

        Raises:
            TrainError: the weights and their gradients do not fit the host's memory, or weights that were tied are on
                two devices.
        """
        dispatched = [model for model in models if _is_dispatched(model)]
        if not dispatched:
            return
        if not optimizers:
            for model in dispatched:
                _refuse_untied(model)
            return
        for optimizer in optimizers:
            self._parameters.repoint(optimizer)
        trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        for model in dispatched:
            self._move(model, trained)
        for optimizer in optimizers:
            self._parameters.repoint(optimizer)

    def _move(self, model: nn.Module, trained: Sequence[nn.Parameter]) -> None:
        from bigmodel.dispatch import prepare_training

        installed = model.__dict__.get("forward")
        mixed = installed if isinstance(installed, MixedPrecisionForward) else None
        if mixed is not None:
            MixedPrecisionForward.remove(model)
        self._parameters.remember(model)
        try:
            prepare_training(model, trained)
        except DispatchError as error:
            raise TrainError(str(error)) from error
        finally:
            self._parameters.learn(model)
            if mixed is not None:
                MixedPrecisionForward.install(model, mixed.precision, mixed.device, mixed.handler)


def _refuse_untied(model: nn.Module) -> None:
    from bigmodel.dispatch.training import refuse_untied

    try:
        refuse_untied(model, [parameter for parameter in model.parameters() if parameter.requires_grad])
    except DispatchError as error:
        raise TrainError(str(error)) from error


def check_one_process(model: nn.Module, several: bool, over_devices: bool) -> None:
    """Refuse a model that several processes cannot share.

    Args:
        several: Whether there is more than one process.
        over_devices: Whether parts of the model are on different devices.

    Raises:
        TrainError: there are several processes, and the model is on several devices or streamed.
    """
    if several and (over_devices or _is_streamed(model)):
        raise TrainError(
            "a model dispatched over several devices cannot be trained by several processes; train it in one, give "
            "each process the whole model, or shard it with FSDP2"
        )


def check_quantized(model: nn.Module) -> None:
    """Refuse a model that bitsandbytes has quantised, and parts of which no bitsandbytes here computes where they are.

    Raises:
        TrainError: parts are on the processor, where this bitsandbytes does not compute, or on disk.
    """
    if not (getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)):
        return
    import bigmodel.accelerator as public  # callers may have replaced what says which devices there are

    places = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    on_host = public.is_bitsandbytes_multi_backend_available() and not public.is_xpu_available()
    if "disk" in places or ("cpu" in places and not on_host):
        raise TrainError(
            "a model in 8-bit or 4-bit precision cannot be trained with CPU or disk offload: bitsandbytes does not "
            "compute with weights there; load it with a device map of accelerators alone, or, for parts on the CPU, "
            "install a bitsandbytes that computes on the CPU"
        )


def _is_dispatched(model: nn.Module) -> bool:
    return any("hf_device_map" in module.__dict__ for module in model.modules())


def _is_streamed(model: nn.Module) -> bool:
    if not _is_dispatched(model):
        return False  # without importing bigmodel.dispatch, which most training processes do not need
    from bigmodel.dispatch import is_streamed

    return is_streamed(model)
