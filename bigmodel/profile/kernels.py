"""What a dry run must know about single kernels: which have no fake, and what memory they take for themselves."""

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


def scratch_bytes(func: Any, args: tuple[Any, ...], output: Any) -> int:
    """Return the bytes of workspace the kernel of `func` holds at its peak beside its inputs and outputs."""
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return _flash_attention_scratch(args[0], args[1])
    return 0


KEY_BLOCK = 512


def _flash_attention_scratch(query: torch.Tensor, key: torch.Tensor) -> int:
    """Every thread holds, in float32, the scores of a block of queries with a block of keys, their maxima and sums,
    and the block's output; for narrower dtypes the scores once more (ATen's FlashAttentionKernel.cpp)."""
    rows, width, keys = query.shape[-2], query.shape[-1], key.shape[-2]
    block = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    keys = min(keys, KEY_BLOCK)
    numbers = block * (keys + 2 + width)
    narrow = block * keys * query.element_size() if query.element_size() < 4 else 0
    return torch.get_num_threads() * (4 * numbers + narrow)
