"""mxfp4: 4-bit floats in groups of 32 with a power of two for each group; the experts of gpt-oss.

``quant_method`` is ``"mxfp4"``. Instead of ``experts.gate_up_proj`` a checkpoint has ``experts.gate_up_proj_blocks``,
(experts, out, groups, 16 bytes), and ``experts.gate_up_proj_scales``, (experts, out, groups), each a biased exponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...sources.headers import TensorEntry
from .format import Read, Scheme, Stored, Tensors, WeightFormat
from .nibbles import float4_pairs, power_of_two

GROUP = 32


@dataclass(frozen=True)
class Mxfp4(WeightFormat):
    """4-bit floats, two per byte, with a power of two for each group of 32."""

    checked = ("weight_scales",)

    @property
    def label(self) -> str:
        return "mxfp4, groups of 32"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        if shape[1] % GROUP:
            raise ValueError(f"rows of {shape[1]} elements are no multiple of the groups of {GROUP}")
        groups = shape[1] // GROUP
        return {
            "weight_blocks": Stored((shape[0], groups, GROUP // 2), (torch.uint8,)),
            "weight_scales": Stored((shape[0], groups), (torch.uint8,)),
        }

    def broken(self, leaf: str, tensor: torch.Tensor) -> str | None:
        is_nan = tensor.numel() > 0 and int(tensor.max()) == 255
        return f"its {leaf} has values of 255, which stand for NaN" if is_nan else None

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        values = float4_pairs(tensors["weight_blocks"][start:stop])
        scales = power_of_two(tensors["weight_scales"][start:stop])
        return values.mul_(scales.unsqueeze(-1)).reshape(stop - start, shape[1])


@dataclass(frozen=True)
class Mxfp4Scheme(Scheme):
    """``quant_method: mxfp4``."""

    method = "mxfp4"
    leaves = frozenset({"weight_blocks", "weight_scales"})
    marks = leaves

    def split(self, key: str) -> tuple[str, str]:
        for leaf in ("blocks", "scales"):
            if key.endswith(f"_{leaf}"):
                return key.removesuffix(f"_{leaf}"), f"weight_{leaf}"
        return super().split(key)

    def format_of(self, name: str, found: Mapping[str, TensorEntry], read: Read | None = None) -> WeightFormat:
        return Mxfp4()


def read(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a ``quantization_config``."""
    return Mxfp4Scheme()
