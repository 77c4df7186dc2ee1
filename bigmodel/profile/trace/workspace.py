"""What memory single kernels take for themselves while they run, beside their inputs and outputs.

The figures are those of ATen's sources, and were held against the kernel's own high-water mark of each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...devices import HOST, virtual

aten = torch.ops.aten

KEY_BLOCK = 512
FEWEST_IN_BLOCKS = 16
"""Channels that oneDNN keeps side by side where the processor has AVX-512; fewer are read as they lie."""


def scratch_bytes(func: Any, args: tuple[Any, ...], output: Any) -> int:
    """Return the bytes of workspace the kernel of `func` holds at its peak beside its inputs and outputs.

    Args:
        func: the operation.
        args: what it is given: (fake) tensors on the device that it is to run on.
        output: what it returned.
    """
    known = _KNOWN.get(func)
    return 0 if known is None else known(args, output)


def _flash_attention(args: tuple[Any, ...], _output: Any) -> int:
    """Every thread holds, in float32, the scores of a block of queries with a block of keys, their maxima and sums,
    and the block's output; for narrower dtypes the scores once more (ATen's FlashAttentionKernel.cpp)."""
    query, key = args[:2]
    rows, width, keys = query.shape[-2], query.shape[-1], key.shape[-2]
    block = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    keys = min(keys, KEY_BLOCK)
    numbers = block * (keys + 2 + width)
    narrow = block * keys * query.element_size() if query.element_size() < 4 else 0
    return torch.get_num_threads() * (4 * numbers + narrow)


def _safe_softmax(args: tuple[Any, ...], _output: Any) -> int:
    """Which scores are minus infinity is held in a byte each (ATen's SoftMax.cpp); a virtual accelerator's kernels
    are the host's, and hold that there."""
    scores: torch.Tensor = args[0]
    return 0 if scores.device.type == virtual.TYPE else scores.numel()


def _convolution(args: tuple[Any, ...], output: torch.Tensor) -> int:
    """On the host oneDNN copies inputs and weights into the order that it computes in; its output is copied back when
    they are gone. Convolutions in float32 that span one position, each, take them as they lie."""
    data, weight, _bias, stride, _padding, _dilation, transposed = args[:7]
    if data.device.type != HOST or transposed or not torch.backends.mkldnn.is_available():
        return 0
    if weight.shape[2:].numel() == 1 and set(stride) == {1} and data.dtype == torch.float32:
        return 0
    copied = data.nbytes if data.shape[1] >= FEWEST_IN_BLOCKS and data.is_contiguous() else 0
    return max(copied + weight.nbytes, output.nbytes)


_KNOWN: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    aten._safe_softmax.default: _safe_softmax,
    aten.convolution.default: _convolution,
}
