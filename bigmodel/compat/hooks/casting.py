"""Hooks that keep a layer's weights in a narrow dtype and cast them to a wider one while the layer runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from .model_hook import ModelHook, add_hook_to_module

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers whose forward reads each weight once, in the dtype of its input."""


class LayerwiseCastingHook(ModelHook):
    """Stores a module's weights in one dtype and computes with them in another.

    Args:
        storage_dtype: Dtype between forwards.
        compute_dtype: Dtype while the module runs.
        non_blocking: As for `torch.Tensor.to`.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: Collection[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Add a `LayerwiseCastingHook` to every linear layer and convolution in `module`.

    Args:
        skip_modules_pattern: Regular expressions; layers in whose name one is found keep their dtype.
        skip_modules_classes: Classes that keep their dtype, with all that is in them.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else (skip_modules_pattern or ())
    classes = tuple(skip_modules_classes or ())

    def visit(part: nn.Module, name: str) -> None:
        if isinstance(part, classes) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for key, child in part.named_children():
            visit(child, f"{name}.{key}" if name else key)

    visit(module, "")
