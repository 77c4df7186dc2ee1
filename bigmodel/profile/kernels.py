"""What a dry run must know about single kernels: where PyTorch's fakes refuse, or differ from what runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

aten = torch.ops.aten


def run_fake(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on fake tensors, also where PyTorch's own fake kernel refuses what the real one takes."""
    if func is aten._grouped_mm.default:
        return _grouped_mm(*args, **kwargs)
    output = func(*args, **kwargs)
    if func is aten.native_batch_norm.default and not args[5] and args[0].device.type != "cuda":
        # In inference only CUDA's kernel makes room for the batch's statistics.
        return output[0], *(statistic.new_empty(0) for statistic in output[1:])
    return output


def _grouped_mm(
    tokens: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any, **kwargs: Any
) -> torch.Tensor:
    """The fake kernel takes bfloat16 only; the CPU's takes every floating point dtype."""
    dtype = kwargs.get("out_dtype") or tokens.dtype
    if tokens.dim() == 2 and weights.dim() == 2:
        assert offsets is not None
        return tokens.new_empty((offsets.shape[0], tokens.shape[0], weights.shape[1]), dtype=dtype)
    return tokens.new_empty((*tokens.shape[:-1], weights.shape[-1]), dtype=dtype)
