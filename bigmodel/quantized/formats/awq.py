"""AWQ: 4-bit integers with a scale and a zero point for each group of consecutive inputs.

``quant_method`` is ``"awq"``. The weight is stored transposed: ``qweight`` (in, out / 8) has eight integers of outputs
in an int32, in the order 0 2 4 6 1 3 5 7; ``qzeros`` (groups, out / 8) likewise, and ``scales`` is (groups, out). A
weight is (integer - zero point) * scale in the dtype of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...sources.headers import TensorEntry
from .format import Read, Scheme, Stored, Tensors, WeightFormat, refuse_config, whole_number
from .nibbles import cast, unpack_words

_PER_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in the word of each of eight consecutive outputs."""


@dataclass(frozen=True)
class Awq(WeightFormat):
    """4-bit integers in groups of `group` inputs; None: one group."""

    group: int | None

    checked = ("scales",)

    @property
    def label(self) -> str:
        return f"awq int4, {'one group' if self.group is None else f'groups of {self.group}'}"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        rows, columns = shape
        group = self.group or columns
        if rows % _PER_WORD:
            raise ValueError(f"{rows} outputs are no multiple of {_PER_WORD}")
        if columns % group:
            raise ValueError(f"{columns} inputs are no multiple of the groups of {group}")
        return {
            "qweight": Stored((columns, rows // _PER_WORD), (torch.int32,)),
            "qzeros": Stored((columns // group, rows // _PER_WORD), (torch.int32,)),
            "scales": Stored((columns // group, rows), (torch.float16, torch.bfloat16, torch.float32)),
        }

    def step(self, shape: tuple[int, int]) -> int:
        return _PER_WORD

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        scales = tensors["scales"][:, start:stop]
        words = slice(start // _PER_WORD, stop // _PER_WORD)
        integers = _in_order(tensors["qweight"][:, words]).to(scales.dtype)
        zeros = _in_order(tensors["qzeros"][:, words]).to(scales.dtype)
        grouped = integers.unflatten(0, (scales.shape[0], -1))
        values = grouped.sub_(zeros.unsqueeze(1)).mul_(scales.unsqueeze(1)).flatten(0, 1)
        return cast(values, dtype).transpose(0, 1)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    octets = unpack_words(words, 4, dim=1).unflatten(1, (-1, _PER_WORD))
    return torch.stack([octets[..., place] for place in _PLACES], dim=-1).flatten(1)


@dataclass(frozen=True)
class AwqScheme(Scheme):
    """``quant_method: awq``."""

    format: Awq
    method = "awq"
    leaves = frozenset({"qweight", "qzeros", "scales"})
    marks = frozenset({"qweight"})

    def format_of(self, name: str, found: Mapping[str, TensorEntry], read: Read | None = None) -> WeightFormat:
        return self.format


def read(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a ``quantization_config``.

    Raises:
        CheckpointFormatError: a value of it is not supported.
    """
    bits = whole_number(config, "bits" if "bits" in config else "w_bit", 4)
    if bits != 4:
        raise refuse_config(f"awq with {bits} bits is not supported; 4 is")
    version = config.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise refuse_config(f"the awq version {version!r:.60} is not supported; gemm is")
    name = "group_size" if "group_size" in config else "q_group_size"
    return AwqScheme(Awq(None if config.get(name) == -1 else whole_number(config, name, 128)))
