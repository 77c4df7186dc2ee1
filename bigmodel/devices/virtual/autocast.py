"""Autocast on the virtual accelerator: which operations compute in half precision, and which in float32.

PyTorch keeps a list of operations per device type; a device type written in Python supplies its own. This is CUDA's
list (see PyTorch's "Autocast Op Reference"), reduced to the operations of common layers and losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from .streams import TYPE

DTYPES = [torch.bfloat16, torch.float16]
"""The dtypes that ``torch.autocast("virtual", dtype)`` accepts."""

_LOWER = (
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("convolution", "addmm", "addmv", "matmul", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "prelu"),
    *("scaled_dot_product_attention", "einsum"),
)
_FLOAT32 = (
    *("exp", "log", "log2", "log10", "log1p", "rsqrt", "reciprocal", "softplus", "logsumexp"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "cumsum", "cumprod", "prod", "sum", "sum.dim_IntList"),
    *("softmax.int", "log_softmax.int", "layer_norm", "group_norm", "linalg_vector_norm", "dist", "cosine_similarity"),
    *("nll_loss", "nll_loss_nd", "nll_loss2d", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    "binary_cross_entropy_with_logits",
)
_KEY = "AutocastPrivateUse1"


def register_autocast(library: torch.library.Library) -> torch.library.Library:
    """Make ATen operations cast their virtual inputs within ``torch.autocast("virtual")``.

    Returns:
        The library that passes all other operations through; it must live as long as `library`.
    """
    for name in _LOWER:
        library.impl(name, _casting(_overload(name), lambda: torch.get_autocast_dtype(TYPE)), _KEY)
    for name in _FLOAT32:
        library.impl(name, _casting(_overload(name), lambda: torch.float32), _KEY)
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    return others


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    result: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return result


def _casting(operation: OpOverload, choose: Callable[[], torch.dtype]) -> Callable[..., Any]:
    """Return `operation` with its virtual floating-point inputs cast to `choose()`; as on CUDA, float64 is not cast."""
    casts = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = choose()

        def cast(value: Any) -> Any:
            eligible = isinstance(value, torch.Tensor) and value.device.type == TYPE and value.is_floating_point()
            return value.to(dtype) if eligible and value.dtype != torch.float64 else value

        with torch._C._ExcludeDispatchKeyGuard(casts):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run
