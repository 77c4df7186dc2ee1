"""GGUF: the block types of llama.cpp, restored as its own Python package does.

A row is a sequence of blocks, each a structure of scales and packed integers. A weight's stored tensor is called by its
type, such as ``weight_q4_k``: uint8, (out, bytes of a row), as it lies in the file. Values are computed in float32.

llama.cpp orders the rows of a Llama's queries and keys otherwise than transformers: pairs of rotated elements beside
each other, and not in two halves of a head. Such weights are put in transformers' order where they are restored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...sources.gguf.types import TYPES, GgmlType
from ...sources.headers import TensorEntry
from .format import FusedPlace, Read, Scheme, Stored, Tensors, WeightFormat, refuse_config
from .nibbles import float4_pairs

METHOD = "gguf"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

BY_LEAF: dict[str, GgmlType] = {kind.leaf: kind for kind in TYPES.values()}


def _float16(octets: torch.Tensor) -> torch.Tensor:
    """Return float16 numbers, from two bytes each along the last dimension, as float32."""
    return octets.contiguous().view(torch.float16).to(torch.float32)


def _halves(octets: torch.Tensor, run: int) -> torch.Tensor:
    """Return 4-bit integers, of each `run` bytes the low halves before the high ones: (blocks, -1, run)."""
    octets = octets.unflatten(-1, (-1, 1, run))
    return torch.cat((octets & 15, octets >> 4), dim=2).flatten(1, 2)


def _bits(octets: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Return integers of `bits`, of each `run` bytes the lowest before the next higher: (blocks, -1, run)."""
    octets = octets.unflatten(-1, (-1, 1, run))
    mask = (1 << bits) - 1
    return torch.cat([(octets >> shift) & mask for shift in range(0, 8, bits)], dim=2).flatten(1, 2)


def _fifth_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return the fifth bits of 32 integers, which lie in 4 bytes, shifted to their place: (blocks, 32)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return (((octets.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).to(torch.float32) * _float16(blocks[:, :2])


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _halves(blocks[:, 2:], 16).flatten(1).to(torch.float32)
    return _float16(blocks[:, :2]) * codes.sub_(8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _halves(blocks[:, 4:], 16).flatten(1).to(torch.float32)
    return _float16(blocks[:, :2]) * codes + _float16(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = (_halves(blocks[:, 6:], 16).flatten(1) | _fifth_bits(blocks[:, 2:6])).to(torch.float32)
    return _float16(blocks[:, :2]) * codes.sub_(16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = (_halves(blocks[:, 8:], 16).flatten(1) | _fifth_bits(blocks[:, 4:8])).to(torch.float32)
    return _float16(blocks[:, :2]) * codes + _float16(blocks[:, 2:4])


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8 scales and the 8 minima of each block of Q4_K or Q5_K, (blocks, 8, 1).

    Both are a float16 each, times 6-bit integers: the low six bits of 4 bytes each, then four bits of 4 further bytes
    with the two high bits of the first.
    """
    low, minimum, mixed = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)), dim=-1)
    minima = torch.cat((minimum & 0x3F, (mixed >> 4) | ((minimum >> 2) & 0x30)), dim=-1)
    scale = _float16(blocks[:, :2]) * scales.to(torch.float32)
    return scale.unsqueeze(-1), (_float16(blocks[:, 2:4]) * minima.to(torch.float32)).unsqueeze(-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    codes = _halves(blocks[:, 16:], 32).to(torch.float32)
    return codes.mul_(scales).sub_(minima)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    codes = _halves(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48], 1, 32) << 4)
    return codes.to(torch.float32).mul_(scales).sub_(minima)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32) * _float16(blocks[:, 208:])
    low = _halves(blocks[:, :128], 64).reshape(-1, 8, 32)
    codes = (low | (_bits(blocks[:, 128:192], 2, 32) << 4)).to(torch.float32).sub_(32)
    return codes.reshape(-1, 16, 16).mul_(scales.unsqueeze(-1))


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    # Elements are twice the value, and the power of two half of it, as in llama.cpp: the smallest have no exponent.
    exponent = blocks[:, :1].to(torch.int32)
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1).clamp(min=0) << 23)
    doubled = float4_pairs(blocks[:, 1:]).mul_(2).unflatten(1, (16, 2)).transpose(1, 2)
    return doubled * bits.view(torch.float32).unsqueeze(-1)


_RESTORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
"""Returns the elements of blocks, uint8 (blocks, bytes), in any shape of that order: float32."""


@dataclass(frozen=True)
class Gguf(WeightFormat):
    """Blocks of one of ggml's types.

    Attributes:
        kind: the type.
        heads: heads whose rows are in llama.cpp's order; None: rows are in transformers' order.
    """

    kind: GgmlType
    heads: int | None = None

    @property
    def label(self) -> str:
        blocks = f", blocks of {self.kind.elements}" if self.kind.elements > 1 else ""
        return f"gguf {self.kind.name}{blocks}"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        rows, columns = shape
        if columns % self.kind.elements:
            raise ValueError(f"rows of {columns} elements are no multiple of the blocks of {self.kind.elements}")
        if self.heads is not None and rows % (2 * self.heads):
            raise ValueError(f"{rows} rows are no even number for each of {self.heads} heads")
        if self.kind.dtype is not None:
            return {self.kind.leaf: Stored(shape, (self.kind.dtype,))}
        nbytes = columns // self.kind.elements * self.kind.nbytes
        return {self.kind.leaf: Stored((rows, nbytes), (torch.uint8,))}

    def step(self, shape: tuple[int, int]) -> int:
        return 1 if self.heads is None else shape[0] // self.heads

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        stored = tensors[self.kind.leaf][start:stop]
        if self.kind.dtype is None:
            blocks = stored.reshape(-1, self.kind.nbytes)
            values = _RESTORE[self.kind.name](blocks).reshape(stop - start, shape[1])
        else:
            values = stored
        if self.heads is None:
            return values
        half = self.step(shape) // 2
        return values.unflatten(0, (-1, half, 2)).transpose(1, 2).reshape(stop - start, shape[1])


@dataclass(frozen=True)
class GgufScheme(Scheme):
    """``quant_method: gguf``, which no published config has: it is made of a file's metadata.

    Attributes:
        heads: heads of the modules whose rows are in llama.cpp's order, by the last part of the module's name.
        interleaved: the model has the experts of a layer as one tensor, with rows of gate and up in turns.
    """

    heads: Mapping[str, int]
    interleaved: bool
    method = METHOD
    leaves = frozenset(BY_LEAF)
    marks = leaves

    def place(self, name: str) -> FusedPlace | None:
        found = _EXPERT.fullmatch(name) if self.interleaved else None
        if found is None:
            return None
        if found[3] == "down":
            return FusedPlace(f"{found[1]}.down_proj", int(found[2]), 0, 1)
        return FusedPlace(f"{found[1]}.gate_up_proj", int(found[2]), int(found[3] == "up"), 2)

    def format_of(self, name: str, found: Mapping[str, TensorEntry], read: Read | None = None) -> WeightFormat:
        if len(found) != 1:
            raise ValueError(f"it is stored twice, as {' and '.join(sorted(found))}")
        return Gguf(BY_LEAF[next(iter(found))], self.heads.get(name.removesuffix(".weight").rpartition(".")[2]))


def read(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a ``quantization_config``.

    Raises:
        CheckpointFormatError: a value of it is not supported.
    """
    heads = config.get("heads") or {}
    if not isinstance(heads, Mapping) or not all(type(count) is int and count > 0 for count in heads.values()):
        raise refuse_config(f"heads are {heads!r:.60}, not positive integers by module")
    return GgufScheme(dict(heads), config.get("interleaved") is True)
