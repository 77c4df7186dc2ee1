"""Quantises full weights into the formats of compressed-tensors, and mxfp4 as gpt-oss has it.

Values are rounded to the nearest, with the scale that the largest of their group needs ("RTN"); no data is calibrated
with. What is written is restored by `bigmodel.quantized.formats`, and by the formats' own libraries, to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError
from .formats.compressed_tensors import Mxfp4Packed, ScaledIntegers
from .formats.format import WeightFormat
from .formats.mxfp4 import GROUP as MXFP4_GROUP

TARGETS = ("int4", "int8", "fp8", "mxfp4")
"""Encodings that a checkpoint can be quantised to."""

DEFAULT_GROUP = 128
CHUNK = 2**20
"""Elements of a weight that are quantised at once. It bounds the memory of intermediate results."""

INTERMEDIATE_BYTES = 40 * CHUNK
"""Bytes of the intermediate results of a chunk, at most."""

_LARGEST_FLOAT4 = 6.0
_LARGEST_FLOAT8 = 448.0
_BIAS = 127


@dataclass(frozen=True)
class Encoding:
    """One way of quantising.

    Attributes:
        target: one of `TARGETS`.
        format: how a weight is stored.
        settings: the ``weights`` of compressed-tensors' config.
        kind: its ``format``.
    """

    target: str
    format: WeightFormat
    settings: Mapping[str, Any]
    kind: str

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a weight (out, in), by leaf.

        Raises:
            CheckpointError: it has values that are not finite.
        """
        rows = max(1, CHUNK // weight.shape[1])
        parts = [self._rows(weight[start : start + rows]) for start in range(0, weight.shape[0], rows)]
        found = {leaf: torch.cat([part[leaf] for part in parts]) for leaf in parts[0]}
        if self.kind == "pack-quantized":
            found["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        return found

    def _rows(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not bool(torch.isfinite(weight).all()):
            raise CheckpointError("values that are not finite cannot be quantised")
        wide = weight.to(torch.float32)
        if self.target == "mxfp4":
            return _mxfp4(wide)
        if self.target == "int4":
            groups = wide.unflatten(1, (-1, int(self.settings["group_size"])))
            scale = _scale(groups, 7.5, weight.dtype)
            codes = (groups / scale.to(torch.float32)).round_().clamp_(-8, 7).flatten(1)
            return {"weight_packed": _packed(codes), "weight_scale": scale.squeeze(-1)}
        if self.target == "int8":
            scale = _scale(wide, 127.5, weight.dtype)
            codes = (wide / scale.to(torch.float32)).round_().clamp_(-128, 127)
            return {"weight": codes.to(torch.int8), "weight_scale": scale}
        scale = _scale(wide, _LARGEST_FLOAT8, weight.dtype)
        values = (wide / scale.to(torch.float32)).clamp_(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)
        return {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scale}


def encoding(target: str, group_size: int | None = None) -> Encoding:
    """Return the way of quantising to `target`.

    Args:
        target: one of `TARGETS`.
        group_size: elements that share a scale, of int4; None: 128. The others have a scale for each row, or, mxfp4,
            for each 32.

    Raises:
        CheckpointError: the target is unknown, or has no such groups.
    """
    if target not in TARGETS:
        raise CheckpointError(f"a checkpoint cannot be quantised to {target!r:.60}; {', '.join(TARGETS)} are possible")
    if group_size is not None and target != "int4" and (target != "mxfp4" or group_size != MXFP4_GROUP):
        raise CheckpointError(f"{target} has no groups of {group_size}: only int4 has groups to choose; leave it out")
    group = DEFAULT_GROUP if group_size is None else group_size
    if target == "int4" and (group <= 0 or group % 8):
        raise CheckpointError(f"the group size is {group}, not a positive multiple of 8, such as 32 or 128")
    common = {"num_bits": 4, "symmetric": True, "dynamic": False, "actorder": None, "observer": "minmax"}
    if target == "int4":
        found = ScaledIntegers(4, False, True, "group", (1, group), True)
        return Encoding(
            target, found, {**common, "type": "int", "strategy": "group", "group_size": group}, "pack-quantized"
        )
    if target == "mxfp4":
        settings = {**common, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        return Encoding(target, Mxfp4Packed(), settings, "mxfp4-pack-quantized")
    is_float = target == "fp8"
    found = ScaledIntegers(8, is_float, False, "channel", (1, 1), True)
    kind = "float" if is_float else "int"
    settings = {**common, "num_bits": 8, "type": kind, "strategy": "channel", "group_size": None}
    return Encoding(target, found, settings, f"{kind}-quantized")


def encode_gpt_oss(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the blocks and scales of gpt-oss's fused experts, given as (experts, in, out)."""
    experts = []
    for expert in weight:
        rows = max(1, CHUNK // expert.shape[0])
        columns = expert.transpose(0, 1)
        parts = [_mxfp4(columns[at : at + rows].float()) for at in range(0, columns.shape[0], rows)]
        experts.append({leaf: torch.cat([part[leaf] for part in parts]) for leaf in parts[0]})
    packed = torch.stack([each["weight_packed"] for each in experts])
    blocks = packed.unflatten(-1, (-1, MXFP4_GROUP // 2))
    return {"blocks": blocks, "scales": torch.stack([each["weight_scale"] for each in experts])}


def _scale(groups: torch.Tensor, largest: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale with which the largest of each group is `largest`, at least the least normal number."""
    scale = (groups.abs().amax(-1, keepdim=True) / largest).to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit integers plus 8, two in a byte and eight in an int32, the first lowest."""
    octets = (codes + 8).to(torch.uint8).unflatten(1, (-1, 2))
    joined = octets[..., 0] | (octets[..., 1] << 4)
    return torch.nn.functional.pad(joined, (0, -joined.shape[1] % 4)).contiguous().view(torch.int32)


def _mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return 4-bit floats, two in a byte, and biased exponents: the floor of the largest's, less that of 4."""
    groups = weight.unflatten(1, (-1, MXFP4_GROUP))
    _, exponent = torch.frexp(groups.abs().amax(-1))
    biased = (exponent - 1 - 2 + _BIAS).clamp_(1, 254)
    scaled = groups * torch.pow(2.0, (_BIAS - biased).to(torch.float32)).unsqueeze(-1)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    # Of two equally near values the one with an even last bit: below 0.25, but from 0.75 on the next, and so on.
    size = scaled.abs()
    codes = torch.bucketize(size.contiguous(), bounds)
    odd_tie = (size.unsqueeze(-1) == bounds[1::2]).any(-1)
    codes = (codes + odd_tie).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    pairs = codes.flatten(1).unflatten(1, (-1, 2))
    return {"weight_packed": pairs[..., 0] | (pairs[..., 1] << 4), "weight_scale": biased.to(torch.uint8)}
