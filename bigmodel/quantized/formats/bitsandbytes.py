"""bitsandbytes: 4-bit codes (nf4, fp4) with a scale for each block of elements, or int8 with a scale for each row.

``quant_method`` is ``"bitsandbytes"``. In 4 bits a weight is flattened: ``weight`` has two codes per byte, the first in
the high half; ``weight.quant_map`` the 16 values of codes; ``weight.absmax`` a factor for each block, itself quantised
in blocks of 256 with ``weight.nested_absmax`` and ``weight.nested_quant_map`` ("double quantisation"). The rest is JSON
in the bytes of ``weight.quant_state.bitsandbytes__nf4``: block size, shape, dtype, and what is added to nested factors.

In int8 a weight is ``weight`` * ``SCB`` / 127. The library multiplies int8 activations with it; here the weight is
restored, and activations stay as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...sources.headers import TensorEntry
from ...sources.index import DuplicateKeyError, once_each
from .format import Read, Scheme, Stored, Tensors, WeightFormat, ceil_div

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_NESTED_BLOCK = 256
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_STATE = "weight.quant_state.bitsandbytes__"
_LARGEST_STATE = 4096
_ONE_127TH = 7.874015718698502e-3


@dataclass(frozen=True)
class Codes(WeightFormat):
    """4-bit codes in blocks.

    Attributes:
        kind: "nf4" or "fp4".
        block: elements that share a factor.
        nested: factors are quantised.
        storage: dtype in which the bytes of the codes are stored.
        state: bytes of the JSON.
        dtype: dtype of the weight in the library; None: not known, since only the header was read.
        offset: what is added to nested factors.
    """

    kind: str
    block: int
    nested: bool
    storage: torch.dtype
    state: int
    dtype: torch.dtype | None = None
    offset: float = 0.0

    checked = ("weight.absmax", "weight.nested_absmax", "weight.nested_quant_map", "weight.quant_map")

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.kind}, blocks of {self.block}"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        count = math.prod(shape)
        if count % (2 * self.storage.itemsize):
            raise ValueError(f"{count} elements do not fill words of {self.storage.itemsize} bytes")
        blocks = ceil_div(count, self.block)
        found = {
            "weight": Stored((count // 2 // self.storage.itemsize, 1), (self.storage,)),
            "weight.absmax": Stored((blocks,), (torch.uint8 if self.nested else torch.float32,)),
            "weight.quant_map": Stored((16,), (torch.float32,)),
            f"{_STATE}{self.kind}": Stored((self.state,), (torch.uint8,)),
        }
        if self.nested:
            found["weight.nested_absmax"] = Stored((ceil_div(blocks, _NESTED_BLOCK),), (torch.float32,))
            found["weight.nested_quant_map"] = Stored((256,), (torch.float32,))
        return found

    def step(self, shape: tuple[int, int]) -> int:
        return self.block // math.gcd(shape[1], self.block)

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        first, last = start * shape[1], stop * shape[1]
        octets = tensors["weight"].view(torch.uint8).view(-1)[first // 2 : ceil_div(last, 2)]
        values = _looked_up(tensors["weight.quant_map"], octets)[: last - first]
        factors = self._factors(tensors, first // self.block, ceil_div(last, self.block))
        whole = values.numel() // self.block * self.block
        values[:whole].view(-1, self.block).mul_(factors[: whole // self.block].unsqueeze(1))
        if whole < values.numel():
            values[whole:].mul_(factors[-1])
        return values.to(self.dtype or dtype).view(stop - start, shape[1])

    def _factors(self, tensors: Tensors, first: int, last: int) -> torch.Tensor:
        stored = tensors["weight.absmax"][first:last]
        if not self.nested:
            return stored
        blocks = torch.arange(first, last, device=stored.device) // _NESTED_BLOCK
        values = tensors["weight.nested_quant_map"][stored.to(torch.int32)]
        return values * tensors["weight.nested_absmax"][blocks] + self.offset


def _looked_up(values: torch.Tensor, octets: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of the codes in bytes, the high half first, by a table of pairs for all 256 bytes."""
    pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=-1).view(torch.int64).view(-1)
    return pairs.index_select(0, octets.to(torch.int32)).view(torch.float32)


@dataclass(frozen=True)
class Int8(WeightFormat):
    """int8 with a scale for each row."""

    checked = ("SCB",)

    @property
    def label(self) -> str:
        return "bitsandbytes int8"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        return {
            "weight": Stored(shape, (torch.int8,)),
            "SCB": Stored((shape[0],), (torch.float32,)),
            "weight_format": Stored(None, (torch.uint8,), optional=True),
        }

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        values = tensors["weight"][start:stop].to(torch.float32)
        return values.mul_(tensors["SCB"][start:stop].unsqueeze(1)).mul_(_ONE_127TH)


@dataclass(frozen=True)
class BitsAndBytesScheme(Scheme):
    """``quant_method: bitsandbytes``."""

    method = "bitsandbytes"
    leaves = frozenset(
        {
            "weight",
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            f"{_STATE}nf4",
            f"{_STATE}fp4",
            "SCB",
            "weight_format",
        }
    )
    marks = frozenset({"weight.absmax", f"{_STATE}nf4", f"{_STATE}fp4", "SCB"})

    def split(self, key: str) -> tuple[str, str]:
        base, dot, leaf = key.rpartition(".weight.")
        return (f"{base}.weight", f"weight.{leaf}") if dot else super().split(key)

    def format_of(self, name: str, found: Mapping[str, TensorEntry], read: Read | None = None) -> WeightFormat:
        if "SCB" in found:
            return Int8()
        kind = next((kind for kind in ("nf4", "fp4") if _STATE + kind in found), None)
        if kind is None:
            raise ValueError("its quant_state is missing")
        missing = [leaf for leaf in ("weight", "weight.absmax") if leaf not in found]
        if missing:
            raise ValueError(f"its {missing[0]} is missing")
        weight, state = found["weight"], found[_STATE + kind]
        blocks = math.prod(found["weight.absmax"].shape)
        block = next((size for size in _BLOCKS if ceil_div(2 * weight.nbytes, size) == blocks), None)
        if block is None:
            raise ValueError(f"its {2 * weight.nbytes} elements are no {blocks} blocks of a known size")
        nested = "weight.nested_absmax" in found
        codes = Codes(kind, block, nested, weight.dtype, math.prod(state.shape))
        return codes if read is None else _with_state(codes, state, read)


def _with_state(codes: Codes, entry: TensorEntry, read: Read) -> Codes:
    """Return the format with what its JSON says.

    Raises:
        ValueError: the JSON is not that of these tensors.
    """
    if entry.dtype != torch.uint8 or entry.nbytes > _LARGEST_STATE:
        raise ValueError(f"its quant_state is not JSON of at most {_LARGEST_STATE} bytes")
    try:
        state = json.loads(bytes(read(entry).flatten().tolist()).decode(), object_pairs_hook=once_each)
    except (ValueError, RecursionError, DuplicateKeyError) as error:
        raise ValueError(f"its quant_state is not JSON ({error})") from error
    if not isinstance(state, dict) or (state.get("quant_type"), state.get("blocksize")) != (codes.kind, codes.block):
        raise ValueError(f"its quant_state is not of {codes.label}")
    dtype = _DTYPES.get(str(state.get("dtype")))
    if dtype is None:
        raise ValueError(f"its quant_state names the dtype {state.get('dtype')!r:.40}")
    offset = state.get("nested_offset", 0.0)
    if codes.nested and (type(offset) is not float or not math.isfinite(offset)):
        raise ValueError(f"its quant_state has the nested_offset {offset!r:.40}, not a finite number")
    return replace(codes, dtype=dtype, offset=offset if codes.nested else 0.0)


def read(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a ``quantization_config``: each weight says for itself how it is stored."""
    return BitsAndBytesScheme()
