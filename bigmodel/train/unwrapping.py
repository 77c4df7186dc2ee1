"""Taking wrappers off a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from bigmodel.train.precision import MixedPrecisionForward


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` was given, where it has made this one."""
    return getattr(model, "_orig_mod", model)


def bare_model(
    model: nn.Module,
    unwrap: Callable[[nn.Module], nn.Module],
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
) -> nn.Module:
    """Return the user's model inside compilation and the strategy's wrapper (taken off by `unwrap`)."""
    compiled = model if hasattr(model, "_orig_mod") else None
    inner = unwrap(uncompiled(model))
    if hasattr(inner, "_orig_mod"):
        compiled, inner = inner, uncompiled(inner)
    if not keep_fp32_wrapper:
        MixedPrecisionForward.remove(inner)
    if compiled is None or not keep_torch_compile:
        return inner
    if uncompiled(compiled) is inner:
        return compiled
    return type(compiled)(inner, compiled.dynamo_ctx)  # the prepared model keeps its wrapper
