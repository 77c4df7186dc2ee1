"""Wrappers of a prepared model: compiling it with `torch.compile`, and unwrapping it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bigmodel.train.configuration import TorchDynamoPlugin
from bigmodel.train.precision.mixed import MixedPrecisionForward


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Compile a model with the plugin's settings."""
    kwargs = plugin.compile_kwargs()
    if not plugin.use_regional_compilation:
        return torch.compile(model, **kwargs)  # type: ignore[return-value]
    return compile_regions(model, **kwargs)


def compile_regions(model: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile, in place, each block of every `ModuleList` of blocks of one class; without any, the whole model.

    Blocks of one class share compiled code, so that compile time does not grow with depth.
    """
    found = False
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
            found = True
            for block in module:
                block.compile(**compile_kwargs)
    return model if found else torch.compile(model, **compile_kwargs)  # type: ignore[return-value]


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside a `torch.compile` wrapper; `model` itself if it is not compiled."""
    return getattr(model, "_orig_mod", model)


def bare_model(
    model: nn.Module,
    unwrap: Callable[[nn.Module], nn.Module],
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
) -> nn.Module:
    """Return the user's model, without the strategy's wrapper (removed by `unwrap`).

    Args:
        model: the prepared model.
        unwrap: removes the strategy's wrapper.
        keep_fp32_wrapper: keep the forward in mixed precision.
        keep_torch_compile: keep the model compiled.
    """
    compiled = model if hasattr(model, "_orig_mod") else None
    inner = unwrap(uncompiled(model))
    if isinstance(inner, nn.DataParallel):
        inner = inner.module
    if hasattr(inner, "_orig_mod"):
        compiled, inner = inner, uncompiled(inner)
    if not keep_fp32_wrapper:
        MixedPrecisionForward.remove(inner)
    if compiled is None or not keep_torch_compile:
        return inner
    if uncompiled(compiled) is inner:
        return compiled
    return type(compiled)(inner, compiled.dynamo_ctx)  # a new wrapper: the prepared model keeps its own
