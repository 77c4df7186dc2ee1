"""fp8: 8-bit floats with a scale for each block of rows and columns, or for the whole weight.

DeepSeek-V3, Qwen3-FP8, GLM-FP8 and others. ``quant_method`` is ``"fp8"``, ``weight_block_size`` gives the block, as
[128, 128]; without it a scale is for the whole weight. A weight is the product of its elements and their block's scale
in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...sources.headers import TensorEntry
from .format import CHUNK, Read, Scheme, Stored, Tensors, WeightFormat, ceil_div, refuse_config
from .nibbles import float8

_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_INPUT_SCALES = ("activation_scale", "input_scale")


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """8-bit floats. `block` is the rows and columns that share a scale; None: all of them."""

    block: tuple[int, int] | None

    checked = ("weight_scale_inv",)

    @property
    def label(self) -> str:
        return "fp8, one scale" if self.block is None else f"fp8, blocks of {self.block[0]} x {self.block[1]}"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        scales = None if self.block is None else (ceil_div(shape[0], self.block[0]), ceil_div(shape[1], self.block[1]))
        return {
            "weight": Stored(shape, (torch.float8_e4m3fn, torch.float8_e5m2)),
            "weight_scale_inv": Stored(scales, _SCALES),
            **{leaf: Stored(None, (torch.float32, torch.bfloat16), optional=True) for leaf in _INPUT_SCALES},
        }

    def step(self, shape: tuple[int, int]) -> int:
        return 1 if self.block is None else self.block[0]

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        values = float8(tensors["weight"][start:stop])
        scales = tensors["weight_scale_inv"].to(torch.float32)
        if self.block is None:
            return values.mul_(scales)
        height, width = self.block
        scales = scales[start // height : ceil_div(stop, height)].repeat_interleave(width, dim=1)[:, : shape[1]]
        whole = (stop - start) // height
        values[: whole * height].unflatten(0, (-1, height)).mul_(scales[:whole].unsqueeze(1))
        if whole < len(scales):
            values[whole * height :].mul_(scales[whole])
        return values


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """``quant_method: fp8``."""

    block: tuple[int, int] | None
    method = "fp8"
    leaves = frozenset({"weight", "weight_scale_inv", *_INPUT_SCALES})
    marks = frozenset({"weight_scale_inv"})

    def format_of(self, name: str, found: Mapping[str, TensorEntry], read: Read | None = None) -> WeightFormat:
        scale = found.get("weight_scale_inv")
        if scale is not None and torch.Size(scale.shape).numel() == 1 and len(scale.shape) < 2:
            return Fp8(None)
        return Fp8(self.block)


def read(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a ``quantization_config``.

    Raises:
        CheckpointFormatError: a value of it is not supported.
    """
    block = config.get("weight_block_size")
    if block is None:
        return Fp8Scheme(None)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= CHUNK for n in block):
        raise refuse_config(f"weight_block_size is {block!r:.60}, not two positive integers")
    return Fp8Scheme((block[0], block[1]))
