"""Taking wrappers off a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from bigmodel.train.precision import MixedPrecisionForward


def bare_model(
    model: nn.Module,
    unwrap: Callable[[nn.Module], nn.Module],
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
) -> nn.Module:
    """Return the user's model inside compilation and the strategy's wrapper (taken off by `unwrap`)."""
    compiled = model if hasattr(model, "_orig_mod") else None
    inner = unwrap(model._orig_mod if compiled is not None else model)  # type: ignore[arg-type]
    inner_compiled = inner if hasattr(inner, "_orig_mod") else None
    if inner_compiled is not None:
        compiled, inner = inner_compiled, inner._orig_mod  # type: ignore[assignment]
    if not keep_fp32_wrapper:
        MixedPrecisionForward.remove(inner)
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = inner
        return compiled
    return inner
