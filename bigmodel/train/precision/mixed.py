"""Mixed precision: what the device supports, autocast, float32 outputs, and fp8 through torchao."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.handlers import AORecipeKwargs, AutocastKwargs
from bigmodel.train.nested import convert_to_fp32
from bigmodel.train.types import PrecisionType

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def check_precision(precision: str, device: torch.device) -> str:
    """Return `precision` if this device can train with it.

    Raises:
        TrainError: an unknown name, or one the device cannot compute in; the message says what is missing.
    """
    if precision not in PrecisionType.list():
        raise TrainError(f"unknown mixed_precision {precision!r}; choose among {PrecisionType.list()}")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise TrainError(f"{torch.cuda.get_device_name(device)} does not compute in bf16; use mixed_precision='fp16'")
    if precision == "fp8":
        check_fp8(device)
    if precision != "no":
        _check_autocast(precision, device)
    return precision


def _check_autocast(precision: str, device: torch.device) -> None:
    try:
        torch.autocast(_autocast_type(device), dtype=_DTYPES[precision])
    except (AssertionError, RuntimeError) as error:
        raise TrainError(
            f"PyTorch has no autocast for {device.type} devices, so they cannot train in {precision}; "
            "use mixed_precision='no'"
        ) from error


def autocast_context(
    precision: str, device: torch.device, handler: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a `torch.autocast` context for `precision`.

    For "no" it does not change an enclosing autocast; a handler that is not enabled disables it.
    """
    dtype = _DTYPES.get(precision)
    if handler is not None and not handler.enabled:
        enabled_outside = torch.is_autocast_enabled(_autocast_type(device))
        return torch.autocast(_autocast_type(device), enabled=False) if enabled_outside else nullcontext()
    if dtype is None:
        return nullcontext()
    cache = handler.cache_enabled if handler is not None else None
    return torch.autocast(_autocast_type(device), dtype=dtype, cache_enabled=cache)


def _autocast_type(device: torch.device) -> str:
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


class MixedPrecisionForward:
    """Runs a module's forward under autocast and converts its half-precision outputs to float32.

    Set as `forward` on the module itself; it can be copied and pickled with the module.
    """

    def __init__(
        self, forward: Callable[..., Any], precision: str, device: torch.device, handler: AutocastKwargs | None
    ) -> None:
        self.forward, self.precision, self.device, self.handler = forward, precision, device, handler
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with autocast_context(self.precision, self.device, self.handler):
            outputs = self.forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    @classmethod
    def install(
        cls, model: nn.Module, precision: str, device: torch.device, handler: AutocastKwargs | None = None
    ) -> None:
        """Make `model` run in mixed precision. Idempotent."""
        if not isinstance(model.forward, cls):
            model.__dict__["forward"] = cls(model.forward, precision, device, handler)

    @classmethod
    def remove(cls, model: nn.Module) -> None:
        """Restore the model's own forward."""
        installed = model.__dict__.get("forward")
        if isinstance(installed, cls):
            del model.__dict__["forward"]
            if getattr(model.forward, "__func__", None) is not getattr(installed.forward, "__func__", None):
                model.__dict__["forward"] = installed.forward  # a forward that another library had set


_NEEDED = (8, 9)


def check_fp8(device: torch.device) -> None:
    """Raise TrainError unless this device can train in fp8; the message names what is missing."""
    missing = []
    if device.type != "cuda":
        missing.append(f"an NVIDIA GPU (this process trains on {device.type})")
    elif torch.cuda.get_device_capability(device) < _NEEDED:
        found = ".".join(str(number) for number in torch.cuda.get_device_capability(device))
        missing.append(f"compute capability 8.9 or above ({torch.cuda.get_device_name(device)} has {found})")
    if find_spec("torchao") is None:
        missing.append("the torchao package (pip install torchao)")
    if missing:
        raise TrainError(f"fp8 needs {' and '.join(missing)}; use mixed_precision='bf16' instead")


def convert_to_fp8(model: nn.Module, device: torch.device, recipe: AORecipeKwargs | None = None) -> nn.Module:
    """Convert the model's linear layers, except the first and the last, to fp8, in place."""
    check_fp8(device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = recipe or AORecipeKwargs()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    edges = {linear[0], linear[-1]} if linear else set()

    def fits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name in edges:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    config = recipe.config or Float8LinearConfig(**recipe.fields_of_config())
    convert_to_float8_training(model, config=config, module_filter_fn=recipe.module_filter_func or fits)
    return model
