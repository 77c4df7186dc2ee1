"""Mixed precision: what the device can do, autocast, and float32 outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch

from bigmodel.errors import TrainError
from bigmodel.train.handlers import AutocastKwargs
from bigmodel.train.operations.nested import convert_to_fp32
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
    return precision


def autocast_context(
    precision: str, device: torch.device, handler: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a `torch.autocast` context for the precision in force; nothing for "no"."""
    dtype = _DTYPES.get(precision)
    if dtype is None or (handler is not None and not handler.enabled):
        enabled_outside = torch.is_autocast_enabled(_autocast_type(device))
        return torch.autocast(_autocast_type(device), enabled=False) if enabled_outside else nullcontext()
    cache = handler.cache_enabled if handler is not None else None
    return torch.autocast(_autocast_type(device), dtype=dtype, cache_enabled=cache)


def _autocast_type(device: torch.device) -> str:
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


def autocast_forward(
    forward: Callable[..., Any], precision: str, device: torch.device, handler: AutocastKwargs | None = None
) -> Callable[..., Any]:
    """Return `forward` run under autocast, its half-precision outputs converted to float32."""

    @wraps(forward)
    def forward_in_mixed_precision(*args: Any, **kwargs: Any) -> Any:
        with autocast_context(precision, device, handler):
            outputs = forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    return forward_in_mixed_precision
