"""compressed-tensors: what llm-compressor writes. One config may have several groups of modules, each in a format.

- ``pack-quantized``: integers of 1 to 8 bits plus half their range, packed along rows into int32 words without gaps;
- ``int-quantized``, ``float-quantized``, ``naive-quantized``: one int8 or float8 for each element;
- ``nvfp4-pack-quantized``: 4-bit floats, two per byte, with an 8-bit float for each 16 and one float32 for all;
- ``mxfp4-pack-quantized``: 4-bit floats, two per byte, with a power of two for each 32.

A weight is (integer - zero point) * scale, computed in the dtype of the scale. A scale belongs to the whole weight
("tensor"), a row ("channel"), consecutive elements of a row ("group"), or a block of rows and columns ("block").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...sources.headers import TensorEntry
from .format import Read, Scheme, SignedIntegers, Stored, Tensors, WeightFormat, ceil_div, refuse_config, whole_number
from .nibbles import float4_pairs, float8, power_of_two, unpack_dense

_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int8, torch.int32, torch.int64)
_OF_INPUTS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
PACKED = "pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
NVFP4 = "nvfp4-pack-quantized"
MXFP4 = "mxfp4-pack-quantized"


@dataclass(frozen=True)
class ScaledIntegers(WeightFormat):
    """Integers or 8-bit floats with a scale, packed or one for each element.

    Attributes:
        bits: bits of an element.
        is_float: elements are 8-bit floats, not integers.
        packed: elements are packed into words.
        strategy: what a scale belongs to: "tensor", "channel", "group" or "block".
        block: rows and columns that share a scale, of "group" and "block".
        symmetric: there are no zero points.
    """

    bits: int
    is_float: bool
    packed: bool
    strategy: str
    block: tuple[int, int]
    symmetric: bool

    checked = ("weight_scale",)

    @property
    def label(self) -> str:
        kind = f"{'float' if self.is_float else 'int'}{self.bits}"
        sizes = f"s of {self.block[1]}" if self.strategy == "group" else f"s of {self.block[0]} x {self.block[1]}"
        return f"{kind}, {self.strategy}{sizes if self.strategy in ('group', 'block') else ' scales'}"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        rows, columns = shape
        if self.strategy == "group" and columns % self.block[1]:
            raise ValueError(f"rows of {columns} elements are no multiple of the groups of {self.block[1]}")
        scales = self._scales_of(shape)
        found = {"weight_scale": Stored(scales, _SCALES)}
        if self.packed:
            found["weight_packed"] = Stored((rows, ceil_div(columns * self.bits, 32)), (torch.int32,))
            found["weight_shape"] = Stored((2,), (torch.int32, torch.int64), optional=True)
        else:
            found["weight"] = Stored(shape, (torch.float8_e4m3fn,) if self.is_float else (torch.int8,))
        if not self.symmetric and self.packed and self.strategy in ("group", "channel"):
            assert scales is not None
            found["weight_zero_point"] = Stored((ceil_div(rows * self.bits, 32), scales[1]), (torch.int32,))
        else:
            zeros = (torch.float8_e4m3fn, *_INTEGERS)
            found["weight_zero_point"] = Stored(scales, zeros, optional=self.symmetric)
        if self.strategy == "group":
            found["weight_g_idx"] = Stored((columns,), _INTEGERS, optional=True)
        any_one = {leaf: Stored(None, (*_SCALES, *_INTEGERS, torch.float8_e4m3fn), True) for leaf in _OF_INPUTS}
        return {**found, **any_one}

    def _scales_of(self, shape: tuple[int, int]) -> tuple[int, int] | None:
        if self.strategy == "tensor":
            return None
        if self.strategy == "channel":
            return shape[0], 1
        return ceil_div(shape[0], self.block[0]), ceil_div(shape[1], self.block[1])

    def step(self, shape: tuple[int, int]) -> int:
        return 32 if self.packed and not self.symmetric else self.block[0]

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        # A product of 8 bits with a scale is exact in float32: rounded to the scale's dtype, it is the product in that.
        kind = tensors["weight_scale"].dtype
        scale = self._part(tensors["weight_scale"], start, stop).to(torch.float32)
        if self.packed:
            values = unpack_dense(tensors["weight_packed"][start:stop], self.bits, shape[1]).to(torch.float32)
            values.sub_(1 << (self.bits - 1))
        elif self.is_float:
            values = float8(tensors["weight"][start:stop])
        else:
            values = tensors["weight"][start:stop].to(torch.float32)
        zero = None if self.symmetric else self._zeros(tensors["weight_zero_point"], shape, start, stop)
        if self.strategy == "group" and "weight_g_idx" in tensors:
            groups = tensors["weight_g_idx"].long()
            groups = torch.where(groups < 0, torch.arange(shape[1], device=groups.device) // self.block[1], groups)
            scale, zero = scale[:, groups], None if zero is None else zero[:, groups]
        elif self.strategy == "group":
            values = values.unflatten(-1, (-1, self.block[1]))
            scale, zero = scale.unsqueeze(-1), None if zero is None else zero.unsqueeze(-1)
        elif self.strategy == "block":
            scale = self._spread(scale, stop - start, shape[1])
            zero = None if zero is None else self._spread(zero, stop - start, shape[1])
        if zero is not None:
            values.sub_(zero.to(torch.float32))
            if self.is_float:
                values = values.to(kind).to(torch.float32)
        values = values.mul_(scale).reshape(stop - start, shape[1])
        return values if kind in (torch.float32, dtype) else values.to(kind)

    def signed_integers(self, shape: tuple[int, int], leaves: Collection[str]) -> SignedIntegers | None:
        if self.is_float or not self.symmetric or "weight_g_idx" in leaves or self.strategy not in ("group", "channel"):
            return None
        return SignedIntegers(self.bits, self.block[1] if self.strategy == "group" else shape[1])

    def integers(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int) -> torch.Tensor:
        if not self.packed:
            return tensors["weight"][start:stop]
        codes = unpack_dense(tensors["weight_packed"][start:stop], self.bits, shape[1])
        return (codes.to(torch.int16) - (1 << (self.bits - 1))).to(torch.int8)

    def scales(self, tensors: Tensors) -> torch.Tensor:
        return tensors["weight_scale"]

    def _zeros(self, stored: torch.Tensor, shape: tuple[int, int], start: int, stop: int) -> torch.Tensor:
        if not self.packed or self.strategy not in ("group", "channel"):
            return self._part(stored, start, stop)
        first = start * self.bits // 32
        words = stored[first : ceil_div(stop * self.bits, 32)].transpose(0, 1)
        codes = unpack_dense(words, self.bits, stop - start).transpose(0, 1)
        return codes.to(torch.int16) - (1 << (self.bits - 1))

    def _part(self, scales: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the scales, or zero points, of some rows."""
        if self.strategy == "tensor":
            return scales.reshape(())[None, None]
        return scales[start // self.block[0] : ceil_div(stop, self.block[0])]

    def _spread(self, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        spread = scales.repeat_interleave(self.block[0], 0)[:rows]
        return spread.repeat_interleave(self.block[1], 1)[:, :columns]


@dataclass(frozen=True)
class Nvfp4(WeightFormat):
    """4-bit floats, two per byte, with an 8-bit float for each 16, which a float32 for all of them divides."""

    checked = ("weight_scale", "weight_global_scale")

    @property
    def label(self) -> str:
        return "nvfp4, groups of 16"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        if shape[1] % 16:
            raise ValueError(f"rows of {shape[1]} elements are no multiple of the groups of 16")
        return {
            "weight_packed": Stored((shape[0], shape[1] // 2), (torch.uint8,)),
            "weight_scale": Stored((shape[0], shape[1] // 16), (torch.float8_e4m3fn,)),
            "weight_global_scale": Stored(None, (torch.float32,)),
            **{leaf: Stored(None, _SCALES, optional=True) for leaf in _OF_INPUTS},
        }

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        # The library divides the scales, as bfloat16, in float32, and returns bfloat16.
        scale = tensors["weight_scale"][start:stop].to(torch.float32) / tensors["weight_global_scale"].reshape(1)
        values = float4_pairs(tensors["weight_packed"][start:stop])
        values = values.unflatten(-1, (-1, 16)).mul_(scale.unsqueeze(-1))
        return _as_bfloat16(values.reshape(stop - start, shape[1]), dtype)


@dataclass(frozen=True)
class Mxfp4Packed(WeightFormat):
    """4-bit floats, two per byte, with a power of two for each 32."""

    @property
    def label(self) -> str:
        return "mxfp4, groups of 32"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        if shape[1] % 32:
            raise ValueError(f"rows of {shape[1]} elements are no multiple of the groups of 32")
        return {
            "weight_packed": Stored((shape[0], shape[1] // 2), (torch.uint8,)),
            "weight_scale": Stored((shape[0], shape[1] // 32), (torch.uint8,)),
            **{leaf: Stored(None, _SCALES, optional=True) for leaf in _OF_INPUTS},
        }

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        values = float4_pairs(tensors["weight_packed"][start:stop]).unflatten(-1, (-1, 32))
        values.mul_(power_of_two(tensors["weight_scale"][start:stop]).unsqueeze(-1))
        return _as_bfloat16(values.reshape(stop - start, shape[1]), dtype)


def _as_bfloat16(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 values as the library does, in bfloat16, unless they are cast to it in any case."""
    return values if dtype == torch.bfloat16 else values.to(torch.bfloat16)


@dataclass(frozen=True)
class ConfigGroup:
    """Modules that are stored in one format: those that one of `targets` names."""

    targets: tuple[str, ...]
    format: WeightFormat


@dataclass(frozen=True)
class CompressedTensorsScheme(Scheme):
    """``quant_method: compressed-tensors``."""

    groups: tuple[ConfigGroup, ...]
    method = "compressed-tensors"
    leaves = frozenset(
        {
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
            "weight_global_scale",
            *_OF_INPUTS,
        }
    )
    marks = frozenset({"weight_packed", "weight_scale"})

    def format_of(self, name: str, found: Mapping[str, TensorEntry], read: Read | None = None) -> WeightFormat:
        module = name.removesuffix(".weight")
        if len(self.groups) == 1:
            return self.groups[0].format
        for matches in (_is_named, _is_class):
            for group in self.groups:
                if any(matches(target, module) for target in group.targets):
                    return group.format
        raise ValueError("no group of quantization_config names it")


def _is_named(target: str, module: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _is_class(target: str, module: str) -> bool:
    return target == "Linear"


def read(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a ``quantization_config``.

    Raises:
        CheckpointFormatError: a value of it is not supported.
    """
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise refuse_config(f"sparse weights ({sparsity.get('format')!r:.60}) are not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise refuse_config("config_groups is missing")
    return CompressedTensorsScheme(tuple(_group(name, group, config) for name, group in groups.items()))


def _group(name: str, group: Any, config: Mapping[str, Any]) -> ConfigGroup:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise refuse_config(f"the group {name!r} says nothing about weights")
    targets = group.get("targets") or ["Linear"]
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise refuse_config(f"the targets of {name!r} are {targets!r:.60}, not names")
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target[3:])
            except re.error as error:
                raise refuse_config(f"the target {target!r:.60} is no regular expression ({error})") from error
    return ConfigGroup(tuple(targets), _format(name, weights, group.get("format") or config.get("format")))


def _format(name: str, weights: Mapping[str, Any], kind: object) -> WeightFormat:
    bits, symmetric = whole_number(weights, "num_bits", 8), weights.get("symmetric", True) is not False
    is_float = weights.get("type", "int") == "float"
    if kind == NVFP4:
        if bits != 4 or not is_float or weights.get("group_size", 16) != 16:
            raise refuse_config(f"the group {name!r} is {NVFP4}, but not of 4-bit floats in groups of 16")
        return Nvfp4()
    if kind == MXFP4:
        if bits != 4 or not is_float or not symmetric or weights.get("group_size", 32) != 32:
            raise refuse_config(f"the group {name!r} is {MXFP4}, but not of symmetric 4-bit floats in groups of 32")
        return Mxfp4Packed()
    if kind not in (PACKED, *PLAIN):
        raise refuse_config(
            f"the format {kind!r:.60} is not supported; {', '.join((PACKED, *PLAIN, NVFP4, MXFP4))} are"
        )
    packed = kind == PACKED
    if bits > 8 or (not packed and bits != 8) or (packed and is_float):
        raise refuse_config(f"{'float' if is_float else 'int'} of {bits} bits is not supported in {kind}")
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    if strategy == "group":
        block = (1, whole_number(weights, "group_size"))
    elif strategy == "block":
        sizes = weights.get("block_structure")
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
            raise refuse_config(f"block_structure is {sizes!r:.60}, not two positive integers")
        block = (sizes[0], sizes[1])
    elif strategy in ("tensor", "channel"):
        block = (1, 1)
    else:
        raise refuse_config(f"the strategy {strategy!r:.60} is not supported; tensor, channel, group and block are")
    return ScaledIntegers(bits, is_float, packed, strategy, block, symmetric)
